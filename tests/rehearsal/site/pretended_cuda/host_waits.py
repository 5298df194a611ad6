"""Counts where a real device would let its host wait: the time in which the host prepares no further work for it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HERE = str(Path(__file__).parent)
_Listener = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


@contextmanager
def counted(project: Path, packages: tuple[str, ...] = ("services", "splitppo")) -> Iterator[Counter[tuple[str, str]]]:
    """Counts the waits within the `with` block, by what the host does and by the function of the project that does it.

    The function is the innermost one of `packages`, as `services/engine/train_engine.py TrainEngine.update`; there is
    none in the backward pass of torch's own functions. Waits of kernels that are pretended count for nothing.
    """
    found: Counter[tuple[str, str]] = Counter()
    folders = tuple(f"{project / package}{os.sep}" for package in packages)

    def listens(what: bytes) -> None:
        where = _place(folders, project)
        if where is not None:
            found[what.decode(), where] += 1

    listen = ctypes.CDLL(os.environ["REHEARSAL_LIBRARY"]).rehearsal_listen
    listener = _Listener(listens)
    listen(listener)
    try:
        yield found
    finally:
        listen(None)


def _place(folders: tuple[str, ...], project: Path) -> str | None:
    """Returns the function of the project that waits; None within the pretended device itself."""
    frame = sys._getframe(2)
    where = "torch"
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_HERE):
            return None
        if where == "torch" and file.startswith(folders):
            where = f"{Path(file).relative_to(project)} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return where
