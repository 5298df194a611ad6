"""Numbers as people read them."""

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def size(num_bytes: float) -> str:
    """Bytes in the unit that leaves at most four digits."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_SIZES) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.1f} {_SIZES[unit]}" if unit else f"{num_bytes:.0f} B"


def span(seconds: float) -> str:
    """Seconds, or milliseconds where there are few."""
    return f"{seconds:.2f} s" if abs(seconds) >= 1.0 else f"{seconds * 1e3:.2f} ms"
