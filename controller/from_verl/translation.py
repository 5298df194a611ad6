"""A verl run in this project's keys: the configuration, and what became of each key that was given."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel

from controller.from_verl.keys import ROWS, row_of
from controller.from_verl.row import NO_DEFAULT, NotNeeded, NotSupported, Outcome, Row
from controller.from_verl.run import GpuGroups, VerlRun, divide_gpus
from controller.from_verl.settings import Settings, nested
from splitppo.config import Config, ConfigError


@dataclass(frozen=True)
class Finding:
    """What became of one key.

    Attributes:
        key, value: verl's.
        to, new: ours, and its value; "" where there is none.
        note: how, why, or what instead.
        row: the pattern of the table that said so; "" for a key that the table does not know.
        is_default: nobody has given it: verl's default, which is not ours.
        stops: the run would learn something else without it.
        is_dropped: it would, but it was dropped by name.
    """

    key: str
    value: Any
    outcome: Outcome
    note: str = ""
    to: str = ""
    new: Any = None
    row: str = ""
    line: int = 0
    is_default: bool = False
    stops: bool = False
    is_dropped: bool = False


@dataclass
class Translation:
    """The configuration as dotted keys, with a comment where the value is not verl's, and the findings."""

    values: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def stopping(self) -> list[Finding]:
        """Those that must be dropped by name, or be had otherwise, before there is a configuration."""
        return [finding for finding in self.findings if finding.stops and not finding.is_dropped]

    def tree(self) -> dict[str, Any]:
        """The configuration as nested sections."""
        return nested(self.values)

    def set(self, key: str, value: Any, comment: str = "") -> None:
        """Unless it is our default, which is left out."""
        self.values.pop(key, None)
        self.comments.pop(key, None)
        if value is not None and not _is_default(key, value):
            self.values[key] = value
            if comment:
                self.comments[key] = comment


def translate(settings: Settings, *, gpus: tuple[int, int] | None, drop: Sequence[str]) -> Translation:
    """Every given key by its row of the table, then verl's defaults where ours differ, then the GPUs.

    `drop` names keys, or sections, that may be left out although the run learns something else without them.

    Raises:
        ConfigError: a value cannot be computed with, `drop` names nothing that was given, or GPUs do not suffice.
    """
    for name in drop:
        if not any(key == name or key.startswith(f"{name}.") for key in settings.given):
            raise ConfigError(f"--drop {name}: {settings.source} sets no such key")
    run = VerlRun(settings, divide_gpus(settings, gpus))
    result = Translation()
    given_rows = {row.key for key in settings.given if (row := row_of(key)) is not None}
    for row in ROWS:
        if row.to and row.default is not NO_DEFAULT and row.key not in given_rows and _applies(row.key, run):
            _take_default(result, _convert(row, row.key, settings.value(row.key), run, 0))
    for key, line in settings.given.items():
        finding = _dropped(_finding(key, line, run), drop)
        result.findings.append(finding)
        if finding.outcome in ("taken", "changed") and not finding.is_dropped and "*" not in finding.to:
            result.set(finding.to, finding.new, finding.note if finding.outcome == "changed" else "")
    _place(result, run, requested=gpus is not None)
    return result


def _take_default(result: Translation, finding: Finding) -> None:
    """What nobody has given, where it is not our default, too."""
    if finding.stops:
        result.findings.append(finding)
    elif finding.outcome in ("taken", "changed") and finding.new is not None:
        note = f"verl's default{f': {finding.note}' if finding.note and finding.outcome == 'changed' else ''}"
        result.set(finding.to, finding.new, note)
        if finding.to in result.values:
            result.findings.append(replace(finding, outcome="changed", note=note, is_default=True))


def _applies(key: str, run: VerlRun) -> bool:
    return run.uses_critic or not (key.startswith("critic.") or key == "trainer.critic_warmup")


def _finding(key: str, line: int, run: VerlRun) -> Finding:
    row = row_of(key)
    if row is None:
        known = [row.key for row in ROWS if not row.is_pattern]
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        note = f"verl's PPO trainer has no such key{f'; did you mean {close[0]}?' if close else ''}"
        return Finding(key, run.value(key), "not supported", note, line=line, stops=True)
    if not _applies(key, run):
        estimator = run.value("algorithm.adv_estimator")
        return Finding(
            key, None, "not needed", f"algorithm.adv_estimator {estimator} has no critic", row=row.key, line=line
        )
    if row.outcome == "not needed":
        return Finding(key, None, "not needed", row.note, row=row.key, line=line)
    return _convert(row, key, run.value(key), run, line)


def _convert(row: Row, key: str, value: Any, run: VerlRun, line: int) -> Finding:
    if row.outcome == "not supported":
        if row.is_off(value):
            return Finding(key, value, "not needed", "off", row=row.key, line=line)
        return Finding(key, value, "not supported", row.note, row=row.key, line=line, stops=row.changes_results)
    if value is None and (row.default is None or row.default is NO_DEFAULT):
        return Finding(key, value, "not needed", "off", row=row.key, line=line)
    try:
        new = row.convert(value, run) if row.convert else value
    except NotNeeded as why:
        return Finding(key, value, "not needed", str(why), row=row.key, line=line)
    except NotSupported as instead:
        return Finding(key, value, "not supported", str(instead), row=row.key, line=line, stops=instead.changes_results)
    # A conversion that gives back what it was given has changed nothing.
    outcome: Outcome = "taken" if row.convert and new == value and type(new) is type(value) else row.outcome
    return Finding(key, value, outcome, row.note, row.to, new, row.key, line)


def _dropped(finding: Finding, drop: Sequence[str]) -> Finding:
    if not any(finding.key == name or finding.key.startswith(f"{name}.") for name in drop):
        return finding
    return replace(finding, outcome="not supported", note="dropped", to="", new=None, stops=True, is_dropped=True)


def _place(result: Translation, run: VerlRun, *, requested: bool) -> None:
    """Ranks and GPUs of each group; `--gpus`, or verl's number divided."""
    groups, per_node, nodes = run.groups, run.value("trainer.n_gpus_per_node"), run.value("trainer.nnodes")
    total = f"{per_node}{f' on each of {nodes} machines' if nodes != 1 else ''}"
    why = "--gpus" if requested else f"of {total}, which both models have in verl" if groups.critic else "as in verl"
    on_cpu, several = run.value("trainer.device") == "cpu", nodes != 1 and not requested
    start = 0
    for role, count in _ranks(groups):
        devices = list(range(start, start + count))
        start += 0 if groups.shared else count
        result.set(f"services.{role}.num_processes", count, why)
        if not on_cpu and not several:
            result.set(f"services.{role}.devices", devices)
    if groups.shared:
        result.set("services.allow_shared_devices", True, "one GPU for both models")
    if several:
        result.set("services.launch", "external", "start the groups on your machines: docs/deployment.md")
        for place, (role, _) in enumerate(_ranks(groups), 7001):
            result.set(
                f"services.{role}.address", f"127.0.0.1:{place}", "of its rank 0; elsewhere with services.security"
            )
    if groups.reward:
        result.set("placement.reward_model", "reward")


def _ranks(groups: GpuGroups) -> Iterator[tuple[str, int]]:
    for role in ("actor", "critic", "reward"):
        if count := getattr(groups, role):
            yield role, count


def _is_default(key: str, value: Any) -> bool:
    section: type[BaseModel] = Config
    *parents, leaf = key.split(".")
    for parent in parents:
        kind = section.model_fields[parent].annotation
        assert isinstance(kind, type)
        assert issubclass(kind, BaseModel)
        section = kind
    field_of = section.model_fields[leaf]
    if field_of.is_required():
        return False
    default = field_of.get_default(call_default_factory=True)
    return bool((list(default) if isinstance(default, tuple) else default) == value)
