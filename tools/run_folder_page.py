"""Makes the tables of docs/run-folder.md from splitppo/run_folder: files, columns of rollouts, kinds of events.

The page is text of people around them; each table stands between two comments that name it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from splitppo.run_folder.columns import COLUMNS, Kind
from splitppo.run_folder.contents import ENTRIES
from splitppo.run_folder.events import KINDS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "run-folder.md"


def run_folder_page() -> str:
    """Returns the page with its tables made anew; ValueError if it lacks the place of one."""
    page = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        begin = f"<!-- {name}: a table of python -m tools.docs -->\n\n"
        end = f"\n\n<!-- {name}: its end -->"
        made = begin + "\n".join(table()) + end
        page, num_places = re.subn(re.escape(begin) + ".*?" + re.escape(end), lambda _: made, page, flags=re.DOTALL)  # noqa: B023
        if num_places != 1:
            raise ValueError(f"{PAGE.name}: expected one place for the table of {name}, found {num_places}")
    return page


def _files() -> list[str]:
    rows = [
        (", ".join(f"`{path}`" for path in entry.paths), entry.content, entry.writer, entry.readers or "people")
        for entry in ENTRIES
    ]
    return _table(("file", "what it holds", "who writes it, and when", "who reads it"), rows)


def _columns(kinds: Collection[Kind]) -> list[str]:
    """Returns the table of the columns of some kinds, without those that validations alone have."""
    rows = [
        (", ".join(f"`{name}`" for name in columns.names), columns.meaning)
        for columns in COLUMNS
        if columns.kind in kinds and columns.names != ("fixed",)
    ]
    return _table(("column", "meaning"), rows)


def _events() -> list[str]:
    rows = [(", ".join(f"`{kind}`" for kind in kinds), fields) for kinds, fields in KINDS.items()]
    return _table(("kind", "further fields"), rows)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in (titles, *rows)]
    return [lines[0], "|" + "---|" * len(titles), *lines[1:]]


TABLES: Mapping[str, Callable[[], list[str]]] = {
    "files": _files,
    "numbers": lambda: _columns(["number"]),
    "recorded": lambda: _columns(["text", "tokens", "turns"]),
    "events": _events,
}
