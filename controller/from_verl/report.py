"""What became of each key, for people: by outcome, one line for a key, or for a row of the table."""

from collections.abc import Collection, Iterable, Iterator
from itertools import groupby

from controller.from_verl.translation import Finding, Translation

_TITLES = (
    ("stops", "not supported, and the run would learn something else; change it, or drop it by name"),
    ("dropped", "dropped, though the run learns something else"),
    ("not supported", "not supported, without any effect on what is learned"),
    ("changed", "changed"),
    ("default", "verl's defaults that are not ours"),
    ("taken", "taken"),
    ("not needed", "not needed"),
)


def report_text(translation: Translation, source: str, environment: Collection[str]) -> str:
    """All findings, those first that need a decision; `environment` are the variables that the script has read."""
    by_kind = {kind: [finding for finding in translation.findings if _kind(finding) == kind] for kind, _ in _TITLES}
    counts = [f"{len(found)} {kind}" for kind, found in by_kind.items() if found and kind not in ("stops", "default")]
    undecided = by_kind["stops"]
    lines = [f"{source}: {len(translation.findings) - len(by_kind['default'])} keys: {', '.join(counts) or 'none'}"]
    if undecided:
        lines[0] += f"; {len(undecided)} to be decided"
    if environment:
        lines.append(f"variables of your environment that it reads: {', '.join(environment)}")
    for kind, title in _TITLES:
        if found := by_kind[kind]:
            lines += ["", f"{title}:", *(f"  {line}" for line in _lines(kind, found))]
    return "\n".join(lines) + "\n"


def _kind(finding: Finding) -> str:
    if finding.is_dropped:
        return "dropped"
    if finding.stops:
        return "stops"
    return "default" if finding.is_default else finding.outcome


def _lines(kind: str, found: Iterable[Finding]) -> Iterator[str]:
    if kind == "not needed":
        for note, group in groupby(sorted(found, key=_note_and_row), key=lambda one: one.note):
            keys = [name for _, of_row in groupby(group, key=lambda one: one.row) for name in _names([*of_row])]
            more = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
            yield f"{', '.join(keys[:4])}{more}: {note}"
        return
    for finding in found:
        where = f" (line {finding.line})" if finding.line and kind == "stops" else ""
        arrow = f" -> {_ours(finding)}" if finding.to else ""
        note = f": {finding.note}" if finding.note and kind != "taken" and not finding.is_default else ""
        yield f"{finding.key} {_short(finding.value)}{where}{arrow}{note}"


def _note_and_row(finding: Finding) -> tuple[str, str]:
    return finding.note, finding.row


def _names(of_row: list[Finding]) -> list[str]:
    """The keys, or the pattern of the table that many of them match."""
    return [finding.key for finding in of_row] if len(of_row) < 4 else [f"{of_row[0].row} ({len(of_row)} keys)"]


def _ours(finding: Finding) -> str:
    if finding.new is None:
        return finding.to
    same = finding.to == finding.key and finding.new == finding.value
    return "the same" if same else f"{finding.to}{'' if finding.new == finding.value else f' {_short(finding.new)}'}"


def _short(value: object) -> str:
    """As in YAML, of one line at most."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
