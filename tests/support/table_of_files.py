"""Finds the row of the table of a run folder's files that a path belongs to."""

from __future__ import annotations

import re
from functools import cache

from splitppo.run_folder.contents import ENTRIES, Entry

_WRITTEN = {"N": "[0-9]+", "{role}": "[a-z]+", "{roles}": "[a-z_]+", "{name}": "[a-z]+", "{host}": "[^/]+"}
_WRITTEN |= {"{digits}": "[0-9a-f]+"}


@cache
def _pattern(path: str) -> re.Pattern[str]:
    """Returns a regular expression for the files that a path of the table stands for, see `Entry.paths`."""
    parts = re.split(r"(\{\w+\}|\bN\b|(?<=_)N\b)", path)
    text = "".join(_WRITTEN.get(part, re.escape(part)) for part in parts)
    return re.compile(text + (".+" if path.endswith("/") else ""))


def entry_of(path: str) -> Entry | None:
    """Returns the row of a file, by its path below the run folder; None for a file that no run writes."""
    return next((entry for entry in ENTRIES if any(_pattern(one).fullmatch(path) for one in entry.paths)), None)
