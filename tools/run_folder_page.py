"""Makes the tables of docs/run-folder.md from splitppo/run_folder: files, columns of rollouts, kinds of events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from splitppo.run_folder.columns import COLUMNS, Kind
from splitppo.run_folder.contents import ENTRIES
from splitppo.run_folder.events import KINDS
from tools.page_tables import DOCS, table, with_tables


def run_folder_page() -> str:
    """Returns the page with its tables made anew; ValueError if it lacks the place of one."""
    return with_tables(DOCS / "run-folder.md", TABLES)


def _files() -> list[str]:
    rows = [
        (", ".join(f"`{path}`" for path in entry.paths), entry.content, entry.writer, entry.readers or "people")
        for entry in ENTRIES
    ]
    return table(("file", "what it holds", "who writes it, and when", "who reads it"), rows)


def _columns(kinds: Collection[Kind]) -> list[str]:
    """Returns the table of the columns of some kinds, without those that validations alone have."""
    rows = [
        (", ".join(f"`{name}`" for name in columns.names), columns.meaning)
        for columns in COLUMNS
        if columns.kind in kinds and columns.names != ("fixed",)
    ]
    return table(("column", "meaning"), rows)


def _events() -> list[str]:
    rows = [(", ".join(f"`{kind}`" for kind in kinds), fields) for kinds, fields in KINDS.items()]
    return table(("kind", "further fields"), rows)


TABLES: Mapping[str, Callable[[], list[str]]] = {
    "files": _files,
    "numbers": lambda: _columns(["number"]),
    "recorded": lambda: _columns(["text", "names", "tokens", "turns"]),
    "events": _events,
}
