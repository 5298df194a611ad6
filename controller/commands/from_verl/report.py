"""Writes the results of a translation from verl: the configuration as YAML, and a report of each key of verl."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import attrgetter
from typing import Any

import yaml

from controller.commands.from_verl.settings import Settings
from controller.commands.from_verl.translation import Finding, Translation
from splitppo.config.keys import KEYS

_TITLES = {
    "unknown": "unknown to every version of verl's PPO trainer; correct it, or drop it by name",
    "to be decided": "not supported, and the run would learn something else; change it, or drop it by name",
    "dropped": "dropped, though the run learns something else",
    "not supported": "not supported, without any effect on what is learned",
    "changed": "changed",
    "default": "verl's defaults that are not ours",
    "taken": "taken",
    "not needed": "not needed",
}
_WITH_LINES = ("unknown", "to be decided", "dropped")  # of the script


def report_text(translation: Translation, settings: Settings) -> str:
    """Formats the report on all translated verl keys as text; keys that the user must decide on come first."""
    by_kind = {kind: [finding for finding in translation.findings if finding.outcome == kind] for kind in _TITLES}
    counts = [f"{len(findings)} {kind}" for kind, findings in by_kind.items() if findings and kind != "default"]
    num_keys = len(translation.findings) - len(by_kind["default"])
    lines = [f"{settings.source}: {num_keys} keys: {', '.join(counts) or 'none'}"]
    if settings.from_environment:
        lines.append(f"variables of your environment that it reads: {', '.join(settings.from_environment)}")
    if settings.unread:
        what = "files that it runs and that were not read (if they set what its keys depend on, set that yourself)"
        lines.append(f"{what}: {', '.join(settings.unread)}")
    if settings.age and not settings.asks_age:
        lines.append(settings.age)
    for kind, title in _TITLES.items():
        if by_kind[kind]:
            lines += ["", f"{title}:", *(f"  {line}" for line in _lines(kind, by_kind[kind]))]
    return "\n".join(lines) + "\n"


def _lines(kind: str, findings: Iterable[Finding]) -> Iterator[str]:
    """Yields the lines of one part of the report; `kind` is the outcome of all its findings.

    A key that is not needed has no line of its own: keys with the same reason share one, which names four of them. Any
    other line is: KEY VALUE (line N) -> OUR KEY: NOTE.
    """
    if kind == "not needed":
        for note, group in groupby(sorted(findings, key=attrgetter("note", "row")), key=attrgetter("note")):
            keys = [name for _, of_row in groupby(group, key=attrgetter("row")) for name in _names([*of_row])]
            more = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
            yield f"{', '.join(keys[:4])}{more}: {note}"
        return
    for finding in findings:
        where = f" (line {finding.line})" if finding.line and kind in _WITH_LINES else ""
        arrow = f" -> {_ours(finding)}" if finding.to else ""
        note = f": {finding.note}" if finding.note and kind != "default" else ""
        yield f"{finding.key} {_short(finding.value)}{where}{arrow}{note}"


def _names(of_row: list[Finding]) -> list[str]:
    """Returns the verl keys that one row of the table matched; for four or more keys of a tree, its pattern."""
    is_tree = "*" in of_row[0].row and len(of_row) >= 4
    return [f"{of_row[0].row} ({len(of_row)} keys)"] if is_tree else [finding.key for finding in of_row]


def _ours(finding: Finding) -> str:
    """Returns what a key of verl has become: "the same", our key, or our key and the value if that has changed."""
    if finding.new is None:
        return finding.to
    if not finding.keeps_value:
        return f"{finding.to} {_short(finding.new)}"
    return "the same" if finding.to == finding.key else finding.to


def _short(value: object) -> str:
    """Formats a configuration value as in YAML, cut after 60 characters."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def yaml_text(values: Mapping[str, Any], comments: Mapping[str, str], header: str) -> str:
    """Formats values by dotted key as nested YAML in SplitPPO's key order, with a header and comments behind values."""
    lines = [f"# {header}"]
    for key in KEYS:
        indent = "  " * key.count(".")
        name = key.rpartition(".")[-1]
        if key in values:
            comment = f"  # {comments[key]}" if key in comments else ""
            lines.append(f"{indent}{name}: {_inline(values[key])}{comment}")
        elif any(other.startswith(f"{key}.") for other in values):
            lines.append(f"{indent}{name}:")
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    """Formats a configuration value as YAML on one line; the loader of SplitPPO reads the same value from the line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1 << 20).strip()
    return text.removesuffix("\n...").strip()
