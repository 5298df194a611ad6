"""Translates the keys of a verl run into values of SplitPPO's keys, and records the outcome for each verl key."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, Literal, cast, get_args

from pydantic.fields import FieldInfo

from controller.commands.from_verl.keys import ROWS, row_of
from controller.commands.from_verl.keys_distillation import teachers_of
from controller.commands.from_verl.keys_run import VETO, rules_with_veto
from controller.commands.from_verl.row import NO_DEFAULT, Noted, NotNeeded, NotSupported, Row, Rule
from controller.commands.from_verl.run import VerlRun
from controller.commands.from_verl.settings import NEXT, Settings
from splitppo.config import Config, ConfigError

# The data sources that verl scores by math_dapo.
_DAPO_SOURCES = ("math_dapo", "math", "math_dapo_reasoning", "aime*")
_ESTIMATOR = "algorithm.adv_estimator"
_FIRST_PORT = 7001  # of the groups on several machines, one after the other
KeyOutcome = Rule | Literal["unknown", "to be decided", "dropped", "default"]


@dataclass(frozen=True)
class Finding:
    """The outcome of the translation for one key of verl.

    Attributes:
        key, value: verl's key and value.
        note: how the value is changed, why the key is not needed, or what to do instead.
        to, new: SplitPPO's key and value; "" if SplitPPO has no such key.
        outcome: what the table says, or that the user must decide, because no version of verl has the key ("unknown")
            or the run would learn something else without it ("to be decided"), or has dropped it by name ("dropped");
            "default" if the value is verl's default, which differs from SplitPPO's.
        row: the key or pattern of the table row that decided; "" for an unknown key.
        line: the line of the launch script; 0 if the key is not from a script.
    """

    key: str
    value: Any
    outcome: KeyOutcome
    note: str = ""
    to: str = ""
    new: Any = None
    row: str = ""
    line: int = 0

    @property
    def keeps_value(self) -> bool:
        """True if SplitPPO's value equals verl's value; True and 1 do not count as equal."""
        return bool(self.new == self.value) and isinstance(self.new, bool) == isinstance(self.value, bool)


@dataclass
class Translation:
    """The result of a translation from verl: values and comments by SplitPPO's dotted keys, findings on verl's keys."""

    values: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def stopping(self) -> list[Finding]:
        """The findings on verl keys that the user must decide on before a configuration is written."""
        return [finding for finding in self.findings if finding.outcome in ("unknown", "to be decided")]

    def set(self, key: str, value: Any, comment: str = "") -> None:
        """Sets the value of a SplitPPO key in the result, or removes the key so that SplitPPO's default holds.

        The key is removed if the value is that default, or if it is None and the key cannot be null.
        """
        self.values.pop(key, None)
        self.comments.pop(key, None)
        can_be_set = value is not None or _takes_null(key)
        if can_be_set and not _is_default(key, value):
            self.values[key] = value
            if comment:
                self.comments[key] = comment


def translate(settings: Settings, *, gpus: tuple[int, int] | None, drop: Sequence[str]) -> Translation:
    """Translates a verl run into SplitPPO's keys: the given keys, defaults of verl that differ, and the GPUs per group.

    Args:
        settings: the configuration of the verl run.
        gpus: the numbers of GPUs of actor and critic; None divides verl's GPUs.
        drop: keys or sections that are left out, although the run learns something else without them.

    Raises:
        ConfigError: a value is not a number, `drop` names a key that is not given, or there are too few GPUs.
    """
    for name in drop:
        if not any(key == name or key.startswith(f"{name}.") for key in settings.given):
            raise ConfigError(f"--drop {name}: {settings.source} sets no such key")
    run = VerlRun(settings, gpus)
    result = Translation()
    given_rows = {row.key for key in settings.given if (row := row_of(key)) is not None}
    for row in ROWS:
        if row.to and row.default is not NO_DEFAULT and row.key not in given_rows and run.has_use_for(row.key):
            _take_default(result, _convert(row, row.key, settings.value(row.key), run))
    for key, line in settings.given.items():
        finding = replace(_dropped(_finding(key, run), drop), line=line)
        result.findings.append(finding)
        if finding.to and finding.outcome in ("taken", "changed") and "*" not in finding.to:
            result.set(finding.to, finding.new, finding.note if finding.outcome == "changed" else "")
    if any(finding.key == VETO and finding.outcome == "changed" for finding in result.findings):
        for key, value in rules_with_veto(run).items():
            result.set(key, value, "with verl's rollout_token_veto_threshold")
    _place(result, run)
    return result


def _take_default(result: Translation, finding: Finding) -> None:
    """Adds a default of verl to the translation if SplitPPO's default differs from it."""
    if finding.outcome == "to be decided":
        result.findings.append(finding)
    elif finding.outcome in ("taken", "changed") and (finding.new is not None or _takes_null(finding.to)):
        note = "verl's default"
        if finding.note and finding.outcome == "changed":
            note = f"{note}: {finding.note}"
        result.set(finding.to, finding.new, note)
        if finding.to in result.values:
            result.findings.append(replace(finding, outcome="default", note=note))


def _finding(key: str, run: VerlRun) -> Finding:
    """Translates one key of verl; a key of the critic is not needed in a run without one."""
    row = row_of(key)
    if row is None:
        return _unknown(key, run.value(key))
    if not run.has_use_for(key):
        who = "a teacher alone" if run.is_taught_alone else f"algorithm.adv_estimator {run.value(_ESTIMATOR)}"
        return Finding(key, None, "not needed", f"{who} has no critic", row=row.key)
    return _convert(row, key, None if row.outcome == "not needed" else run.value(key), run)


def _unknown(key: str, value: Any) -> Finding:
    """Returns the finding for a key that verl does not have; one without a value changes nothing."""
    if value in (None, [], {}):
        return Finding(key, value, "not needed", "off")
    close = difflib.get_close_matches(key, [row.key for row in ROWS if not row.is_pattern], n=1, cutoff=0.8)
    note = f"did you mean {close[0]}?" if close else "mistyped, of a fork, or of a version of verl after 0.9"
    return Finding(key, value, "unknown", note)


def _convert(row: Row, key: str, value: Any, run: VerlRun) -> Finding:
    """Converts a verl value by a row of the table and returns the finding; an equal value counts as "taken"."""
    try:
        new = _new_value(row, value, run)
    except NotNeeded as why:
        return Finding(key, value, "not needed", str(why), row=row.key)
    except NotSupported as instead:
        outcome: KeyOutcome = "to be decided" if instead.changes_results else "not supported"
        return Finding(key, value, outcome, str(instead), row=row.key)
    if isinstance(new, Noted):
        return Finding(key, value, "changed", new.note, new.to or row.to, new.value, row.key)
    note = row.note if row.outcome == "changed" else ""
    finding = Finding(key, value, row.outcome, note, row.to, new, row.key)
    return replace(finding, outcome="taken") if finding.keeps_value else finding


def _new_value(row: Row, value: Any, run: VerlRun) -> Any:
    """Converts a value of verl by a row of the table; raises NotNeeded or NotSupported if it has no place here."""
    if row.outcome == "not needed":
        raise NotNeeded(row.note)
    if row.outcome == "not supported":
        raise NotNeeded("off") if row.is_off(value) else NotSupported(row.note, changes_results=row.changes_results)
    if value is None and row.default in (None, NO_DEFAULT) and not _takes_null(row.to):
        raise NotNeeded("off")
    return row.convert(value, run) if row.convert else value


def _dropped(finding: Finding, drop: Sequence[str]) -> Finding:
    if not any(finding.key == name or finding.key.startswith(f"{name}.") for name in drop):
        return finding
    return replace(finding, outcome="dropped", note="dropped", to="", new=None)


def _place(result: Translation, run: VerlRun) -> None:
    """Sets the number of ranks, and the GPUs, of each role's process group in the translated configuration.

    GPUs are numbered from 0 on each machine. A group has those behind the groups before it; on several machines, if
    they do not fit behind them, the first ones of other machines.
    """
    groups = run.groups
    on_cpu = run.value("trainer.device") == "cpu"
    several = _has_several_machines(run)
    comments = {
        "num_processes": _why_so_many(run),
        "address": "of rank 0; other machines need services.security",
        "master_addr": "the name of machine 0 of the group: put yours",
        "devices": "of each machine" if several else "",
    }
    next_gpu = 0
    for port, (role, count) in enumerate(groups.ranks().items(), _FIRST_PORT):
        group: dict[str, Any] = {"num_processes": count}
        nodes, gpus_of_node = _pool_in_verl(role, run)
        machines = _num_machines(count, int(nodes), gpus_of_node) if several else 1
        if several:
            group["address"] = f"127.0.0.1:{port}"
        if machines > 1:
            group |= {"nnodes": machines, "master_addr": f"{role}-0"}
        on_each = count // machines
        has_room = next_gpu + on_each <= gpus_of_node or not several
        first = next_gpu if has_room else 0
        if not on_cpu:
            group["devices"] = list(range(first, first + on_each))
        is_critics_too = groups.shared and role == "actor"
        next_gpu = first if is_critics_too else first + on_each
        if role == "rollout":  # by default there is no such section, so it is set as a whole
            result.set("services.rollout", group, "of its own, as in verl")
            continue
        for key, value in group.items():
            result.set(f"services.{role}.{key}", value, comments.get(key, ""))
    if groups.shared:
        result.set("services.allow_shared_devices", True, "one GPU for both models")
    if several:
        result.set("services.launch", "external", "you start the groups on your machines: docs/hosts.md")
    _place_frozen_models(result, run)


def _why_so_many(run: VerlRun) -> str:
    """Returns the comment on the number of ranks of a group: what it is a part of."""
    if run.requested:
        return "--gpus"
    nodes = run.value("trainer.nnodes")
    total = f"{run.value('trainer.n_gpus_per_node')}{f' on each of {nodes} machines' if nodes != 1 else ''}"
    in_verl = f"of {total}, which both models have in verl" if run.groups.critic else "as in verl"
    idle = run.groups.idle
    return in_verl + (f"; {idle} are left over: a mini-batch has no more rows" if idle else "")


def _rollout_nodes(run: VerlRun) -> Any:
    """Returns the machines of verl's own pool for rollouts; 1 without a rollout group."""
    return run.value("rollout.nnodes") if run.groups.rollout else 1


def _has_several_machines(run: VerlRun) -> bool:
    """Returns True if the run is on more than one machine, as one of verl's pools is; never if `--gpus` is given."""
    has_pool_of_several = run.value("trainer.nnodes") != 1 or _rollout_nodes(run) != 1 or run.teacher_nodes > 1
    return bool(has_pool_of_several and not run.requested)


def _pool_in_verl(role: str, run: VerlRun) -> tuple[Any, int]:
    """Returns the machines, and the GPUs of each, of the pool in which verl has a role.

    Our reward group hosts the teachers, which have a pool of their own in verl (`distillation`).
    """
    if role == "rollout":
        return _rollout_nodes(run), int(run.value("rollout.n_gpus_per_node"))
    if role == "reward":
        return run.teacher_nodes or 1, int(run.value("distillation.n_gpus_per_node"))
    return run.value("trainer.nnodes"), int(run.value("trainer.n_gpus_per_node"))


def _num_machines(count: int, nodes: int, per_node: int) -> int:
    """Returns on how many machines `count` ranks are: all of verl's if they divide the ranks, else as few as can."""
    if count % nodes == 0 and count // nodes <= per_node:
        return nodes
    return next(number for number in range(-(-count // per_node), count + 1) if count % number == 0)


def _place_frozen_models(result: Translation, run: VerlRun) -> None:
    """Sets teachers, and the groups of reward model and teachers; verl has one key for each teacher."""
    if run.has_reward_pool:
        result.set("placement.reward_model", "reward")
    if teachers := teachers_of(run):
        result.set("teacher.model", teachers.pop("", ""))
        result.set("teacher.models", teachers)
        result.set("teacher.dtype", "bf16", "of the computation, as in verl's engine")
        result.set("placement.teacher", "reward" if run.teacher_nodes else "auto")
    if run.settings.version >= NEXT and not result.values.get("reward.custom_function_path"):
        boxed = {source: [{"name": "math_dapo_boxed"}] for source in _DAPO_SOURCES}
        result.set("reward.scorers", boxed, "as verl scores these after 0.9")
    if run.is_taught_alone:
        result.set("algorithm.filter_groups.enable", False)
        result.set("reward.overlong_buffer.enable", False)
    if "reward_model.model" in result.values:
        dtypes = [finding for finding in result.findings if finding.to == "reward_model.dtype"]
        result.set("reward_model.dtype", dtypes[-1].new if dtypes else "bf16", "of the computation, as in verl")
        result.set("reward_model.rule_coef", 0.0, "the model's score alone; 1 adds the reward function's")


def _takes_null(key: str) -> bool:
    """Returns True if the SplitPPO key may be null, and null is not the default of that key."""
    if not key or "*" in key:
        return False
    field_of = _field(key)
    return field_of.default is not None and NoneType in get_args(field_of.annotation)


def _is_default(key: str, value: Any) -> bool:
    default = _field(key).get_default(call_default_factory=True)
    return bool((list(default) if isinstance(default, tuple) else default) == value)


def _field(key: str) -> FieldInfo:
    """Returns the field of a configuration key with dots."""
    section: Any = Config
    *parents, leaf = key.split(".")
    for parent in parents:
        section = section.model_fields[parent].annotation
    return cast("FieldInfo", section.model_fields[leaf])
