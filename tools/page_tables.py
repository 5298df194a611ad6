"""Makes tables anew in pages of docs/ that people write, each between two comments that name it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def with_tables(page: Path, tables: Mapping[str, Callable[[], Sequence[str]]]) -> str:
    """Returns a page with its tables made anew, given as lines by name; ValueError if it lacks the place of one."""
    text = page.read_text(encoding="utf-8")
    for name, make in tables.items():
        begin = f"<!-- {name}: a table of python -m tools.docs -->\n\n"
        end = f"\n\n<!-- {name}: its end -->"
        made = begin + "\n".join(make()) + end
        text, num_places = re.subn(re.escape(begin) + ".*?" + re.escape(end), lambda _: made, text, flags=re.DOTALL)  # noqa: B023
        if num_places != 1:
            raise ValueError(f"{page.name}: expected one place for the table of {name}, found {num_places}")
    return text


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in (titles, *rows)]
    return [lines[0], "|" + "---|" * len(titles), *lines[1:]]
