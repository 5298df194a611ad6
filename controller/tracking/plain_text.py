"""Formats tables, numbers of bytes and times as plain text."""

from collections.abc import Iterable, Sequence

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def columns(rows: Iterable[Sequence[str]], *, gap: int) -> list[str]:
    """Formats a table as one line of text per row, with `gap` blanks between aligned columns; rows are equally long."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        (" " * gap).join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    ]


def size(num_bytes: float) -> str:
    """Formats a number of bytes in the unit in which the number is below 1000, e.g. "1.5 GiB"."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_SIZES) - 1:
        num_bytes = num_bytes / 1024
        unit = unit + 1
    return f"{num_bytes:.1f} {_SIZES[unit]}" if unit else f"{num_bytes:.0f} B"


def span(seconds: float) -> str:
    """Formats a time given in seconds as seconds, or as milliseconds if it is below a second, e.g. "1.50 s"."""
    return f"{seconds:.2f} s" if abs(seconds) >= 1.0 else f"{seconds * 1e3:.2f} ms"


def clock(seconds: float) -> str:
    """Formats a time given in seconds as minutes and seconds, or with hours, e.g. "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
