"""The one exception of the package."""


class KvminiError(ValueError):
    """A user's mistake: what was wrong and what would be right, in one line.

    Example:
        >>> from kvmini import KvminiError
        >>> issubclass(KvminiError, ValueError)
        True
    """


def count_of(value, name: str, lowest: int = 1, highest: int = 2**31 - 1) -> int:
    """`value` if it is a whole number from lowest to highest; an error that names it otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise KvminiError(f"{name} must be a whole number from {lowest} to {highest}, not {value!r}")
    return value
