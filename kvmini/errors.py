"""The one exception of the package."""


class KvminiError(ValueError):
    """A user's mistake: what was wrong and what would be right, in one line.

    Example:
        >>> from kvmini import KvminiError
        >>> issubclass(KvminiError, ValueError)
        True
    """


def count_of(value, name: str) -> int:
    """`value` if it is a whole number of at least 1; an error that names it otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise KvminiError(f"{name} must be a whole number of at least 1, not {value!r}")
    return value
