"""Tables and numbers as plain text."""

from collections.abc import Iterable, Sequence

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def columns(rows: Iterable[Sequence[str]], *, gap: int) -> list[str]:
    """Returns a line for each row, with `gap` blanks between aligned columns; all rows have the same length."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        (" " * gap).join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    ]


def size(num_bytes: float) -> str:
    """Returns a number of bytes in the unit in which it is below 1000, e.g. "1.5 GiB"."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_SIZES) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.1f} {_SIZES[unit]}" if unit else f"{num_bytes:.0f} B"


def span(seconds: float) -> str:
    """Returns a time in seconds, or in milliseconds if it is below a second."""
    return f"{seconds:.2f} s" if abs(seconds) >= 1.0 else f"{seconds * 1e3:.2f} ms"
