"""Tells the time in a way that never jumps, for what a timeline and timings are made of.

The system's clock may be set while a process runs, by hand or by NTP. This clock reads it once, at its import, and from
then on counts as the monotonic clock does. Clocks of two processes differ by a constant, as those of two machines do.
"""

import time

_EPOCH_NS = time.time_ns() - time.monotonic_ns()


def unix_ns() -> int:
    """Returns the time in unix nanoseconds."""
    return _EPOCH_NS + time.monotonic_ns()


def unix_s() -> float:
    """Returns the time in unix seconds."""
    return unix_ns() / 1e9
