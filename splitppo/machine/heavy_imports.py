"""Imports modules faster that make very many objects, as torch and transformers do."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Lets Python's search for cyclic garbage rest, which takes a sixth of the time that a rank's imports need.

    What they have made stays out of later searches, too, for it is never garbage.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
