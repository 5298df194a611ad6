"""Which random models and inputs the tests have: others by an environment variable, so that no test leans on one draw.

What a random model says, how long it is and how it scores depends on the last bits of a processor. A test that passes
with one draw alone fails on another machine.
"""

from __future__ import annotations

import os

VARIABLE = "SPLITPPO_TEST_SEED"
# Farther apart than the seeds that tests name, so that no model of a shifted run is another one of the usual run.
STRIDE = 1000


def shifted(seed: int) -> int:
    """Returns the seed that stands for `seed` in this run of the tests: `seed` itself unless `VARIABLE` is set.

    Raises:
        ValueError: the variable is no whole number of 0 or more.
    """
    text = os.environ.get(VARIABLE, "0")
    if not text.isdecimal():
        raise ValueError(f"{VARIABLE} is {text!r}: expected a whole number, 0 or more")
    return seed + STRIDE * int(text)
