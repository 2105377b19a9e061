"""Rows as text. Nothing is measured here. Next file: `plots/style.py`."""

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
Column = tuple[str, str, str | Callable[[Row], str]]  # header, key of the row ("": none), how to show


def table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """A text table: words to the left, figures to the right, "-" where a figure does not apply.

    Example:
        >>> print(table([{"name": "exact", "ppl": 72.57}, {"name": "c-t", "ppl": None}],
        ...             [("", "name", ""), ("perplexity", "ppl", ".1f")]))
               perplexity
        exact        72.6
        c-t             -
    """
    lines = []
    height = max(header.count("\n") for header, _, _ in columns) + 1
    for header, key, form in columns:
        cells = [_show(row, key, form) for row in rows]
        head = header.split("\n")
        cells = [*[""] * (height - len(head)), *head, *cells]
        width = max(map(len, cells))
        words = any(isinstance(row.get(key), str) for row in rows)
        lines.append([cell.ljust(width) if words else cell.rjust(width) for cell in cells])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*lines, strict=True))


def _show(row: Row, key: str, form: str | Callable[[Row], str]) -> str:
    value = row.get(key)
    if key and value is None:
        return "-"
    if callable(form):
        return form(row)
    return ("yes" if value else "no") if isinstance(value, bool) else format(value, form)


def plus_minus(key: str) -> Callable[[Row], str]:
    """Shows a share in percent with its standard error, `key` and `key`_standard_error."""
    return lambda row: f"{100 * row[key]:.0f} ± {100 * row[f'{key}_standard_error']:2.0f}"


NAME = ("", "name", "")
BITS = [("bits:\nbody", "body_bits_per_element", ".2f"), ("\nheld", "bits_per_element", ".2f"),
        ("\n(w16)", "bits_per_element_16bit_windows", ".2f")]
PERPLEXITY = ("\nperplexity", "perplexity", ".1f")
KEY_ERRORS = [("keys, %:\nstored", "key_error", ".1f"), ("\nscores", "score_error", ".1f")]
VALUE_ERRORS = [("values, %:\nstored", "value_error", ".1f"), ("\noutput", "output_error", ".1f")]
