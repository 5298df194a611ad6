"""Makes the table of docs/running.md with the configuration keys that a resumed run may change, from their marks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from splitppo.config import Config
from splitppo.config.keys import KEYS
from tools.page_tables import DOCS, table, with_tables


def running_page() -> str:
    """Returns the page with its table made anew; ValueError if it lacks the place of it."""
    return with_tables(DOCS / "running.md", {"keys that may change": lambda: table(("section", "keys"), _rows())})


def _rows() -> Iterator[Sequence[str]]:
    """Yields the sections of a configuration, those with the same keys together, and which of their keys may change."""
    sections_of: dict[str, list[str]] = {}
    for section in Config.model_fields:
        if keys := _keys_of(section):
            sections_of.setdefault(keys, []).append(f"`{section}`")
    for keys, sections in sections_of.items():
        yield ", ".join(sections), keys


def _keys_of(section: str) -> str:
    """Returns the keys of a section that may change: all, all but some, or some; "" if none may."""
    if KEYS[section].may_change:
        fixed = _inside(section, may_change=False)
        return f"all but {fixed}" if fixed else "all"
    return _inside(section, may_change=True)


def _inside(section: str, *, may_change: bool) -> str:
    """Names the keys inside a section that may change, or may not; a section inside it stands for all of its keys."""
    found: list[str] = []
    for path in KEYS:
        is_named = any(path.startswith(f"{one}.") for one in found)
        of_path = [key for name, key in KEYS.items() if f"{name}.".startswith(f"{path}.")]
        if path.startswith(f"{section}.") and not is_named and all(key.may_change == may_change for key in of_path):
            found.append(path)
    return ", ".join(f"`{path.removeprefix(f'{section}.')}`" for path in found)
