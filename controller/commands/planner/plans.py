"""Lists all ways to place a run on N devices, with the predicted step time, idle shares and memory of each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import get_args

from controller.commands.planner.hidden_critic import CRITIC_PHASES, HiddenCritic, hidden_critic
from controller.commands.planner.measured import Measurement, host_of, rows_of
from controller.commands.planner.part_shares import response_share
from controller.commands.planner.place import Place, placed
from controller.commands.planner.rehearsal import Dataflow, Seconds, step_time
from controller.commands.planner.scaling import PhaseTimes, phase_times
from controller.memory.estimate import GroupMemory
from controller.memory.plan import memory_plan
from controller.memory.terms import GIB
from splitppo.config import Config, ConfigError, Schedule
from splitppo.config.batch_plan import batch_plan
from splitppo.config.keys import step_work
from splitppo.config.section import RoleName

MAX_DEVICES = 4096  # every division of them among the groups is looked at


@dataclass(frozen=True)
class Plan(Place):
    """One way to place a run, with its predictions; one row of the printed table.

    Attributes:
        step_s: seconds of a step.
        bubbles: the idle share of each pool, 0 to 1.
        memory_gib: peak memory of a rank of each group; if colocated, of a device that both share; None if unknown.
        laws: the laws that scaled phases to these devices; empty if all phases were measured on this many devices.
        is_measured: True if one of the runs had this layout.
    """

    step_s: float
    bubbles: Mapping[str, float]
    memory_gib: Mapping[str, float | None]
    laws: tuple[str, ...]
    is_measured: bool = False


@dataclass(frozen=True)
class Plans:
    """All ways to place a run on a number of devices, with their predictions and the measurement behind them.

    Attributes:
        measured: the measurement of the first run.
        fitted_s: seconds of a step that the model predicts for the first run's own layout.
        slowdown: the factor by which work of a group takes longer while another group works, too.
        rows: the plans, fastest first.
        shares: plans of the first run's own layout with other values of rollout.share, lowest first; without a rollout
            group, with one on the critic's devices. Empty if the run has neither a rollout group nor a critic, or has
            rollout.staleness 1 or rollout.max_step_tokens, where one group samples all.
        times: the measured seconds of each phase.
        critic: the largest critic that costs no time under `overlap` on the first run's devices; None without a critic.
        refused: a sentence for each layout that is not possible, with the reason.
    """

    measured: Measurement
    fitted_s: float
    slowdown: float
    rows: tuple[Plan, ...]
    refused: tuple[str, ...]
    shares: tuple[Plan, ...]
    times: Mapping[str, PhaseTimes]
    critic: HiddenCritic | None = None

    @property
    def error(self) -> float:
        """The relative error of the step time that is predicted for the first measured run."""
        return abs(self.fitted_s - self.measured.step_s) / self.measured.step_s

    @property
    def best_split(self) -> Plan | None:
        """The fastest plan in which actor and critic have devices of their own; None without such a plan."""
        return next((row for row in self.rows if row.layout != "colocated"), None)

    @property
    def colocated(self) -> Plan | None:
        """The plan in which actor and critic share all devices; None without such a plan."""
        return next((row for row in self.rows if row.layout == "colocated"), None)


def make_plans(measurements: Sequence[Measurement], num_devices: int | None) -> Plans:
    """Predicts all ways to place a run on `num_devices` devices, from the measurements of one or more runs.

    `num_devices` None stands for the devices of the first run.

    Raises:
        ConfigError: there are fewer than two devices, the runs do different work, or no layout is possible.
    """
    first = measurements[0]
    config = first.config
    times, slowdown = phase_times(measurements)
    own = _own_devices(first)
    total = sum(own.values()) if num_devices is None else num_devices
    if not max(2, len(own)) <= total <= MAX_DEVICES:
        raise ConfigError(
            f"--gpus {total}: expected at least {max(2, len(own))}, one for each group ({', '.join(own)}), and at most"
            f" {MAX_DEVICES}"
        )
    for other in measurements[1:]:
        theirs = step_work(other.config)
        if different := [key for key, value in step_work(config).items() if theirs[key] != value]:
            raise ConfigError(
                f"{other.config.run.dir} does other work than {config.run.dir}: expected the same models, batch and"
                f" lengths, on other devices; different: {', '.join(different)}"
            )
    predictor = _Predictor(config, times, slowdown, first.idle_s)
    run_places = [_place_of(run, run.config) for run in measurements]
    rows = []
    refused = []
    for place in _places(first, total):
        try:
            memory = predictor.memory_of(place)
            rows.append(predictor.plan(place, memory, is_measured=place in run_places))
        except ConfigError as why:
            refused.append(f"{place.layout} {' + '.join(map(str, place.devices.values()))}: {why}")
    if not rows:
        raise ConfigError(f"--gpus {total}: no layout is possible; {refused[0]}")
    rows.sort(key=lambda row: row.step_s)
    fitted_s = predictor.plan(run_places[0], {}).step_s
    shares = tuple(predictor.plan(place, {}) for place in _shares(config, run_places[0])) if "gen" in times else ()
    critic = None
    if config.uses_critic:
        overlapped = replace(run_places[0], layout="overlap")
        critic = hidden_critic(config, lambda size: predictor.plan(overlapped, {}, critic_size=size).step_s)
    return Plans(first, fitted_s, slowdown, tuple(rows), tuple(refused), shares, times, critic)


def _place_of(run: Measurement, config: Config) -> Place:
    """Returns how a measured run was placed."""
    return Place(config.run.schedule, run.devices, config.reference_host, run.share, config.rollout_shares_devices)


def _own_devices(measured: Measurement) -> dict[str, int]:
    """Returns the number of devices of each group that has devices of its own."""
    shares = measured.config.rollout_shares_devices
    return {role: count for role, count in measured.devices.items() if not (shares and role == "rollout")}


def _shares(config: Config, own: Place) -> Iterator[Place]:
    """Yields the layout of a run with other shares; without a rollout group, with one that has the critic's devices.

    A reference on the critic's devices also moves to the actor then, as `placement.reference: auto` does.
    """
    devices = own.devices
    takes_turns = own.takes_turns
    hosts = [own.reference]
    if config.rollout.has_older_weights or not (own.share or config.uses_critic):
        return
    if not own.share:
        devices = {**devices, "rollout": devices["critic"]}
        takes_turns = True
        hosts += ["actor"] * (own.reference == "critic")
    for share in sorted({own.share, *(number / 20 for number in range(21))}):
        yield from (Place(own.layout, devices, host, share, takes_turns) for host in (hosts if share else hosts[:1]))


def _places(measured: Measurement, total: int) -> Iterator[Place]:
    """Yields all ways to place a run on `total` devices.

    A reward group keeps its devices; the others have all the rest. A rollout group has devices of its own, or those of
    the critic, as in the measured run.
    """
    config = measured.config
    takes_turns = measured.config.rollout_shares_devices
    rollout = (measured.share, takes_turns)
    hosts: Sequence[RoleName | None] = config.trained_roles if config.uses_reference else (None,)
    schedules: Sequence[Schedule] = [name for name in get_args(Schedule) if config.uses_critic or name != "overlap"]
    kept = {role: count for role, count in measured.devices.items() if role == "reward"}
    total -= sum(kept.values())
    split = [role for role in _own_devices(measured) if role != "reward"]
    if config.uses_critic and not measured.share:
        yield Place("colocated", {"all": total, **kept}, hosts[0], *rollout)
    for schedule in schedules:
        # The devices stand in a row; each choice of the places to cut it gives every group the piece between two cuts.
        for cuts in combinations(range(1, total), len(split) - 1):
            counts = (end - begin for begin, end in pairwise((0, *cuts, total)))
            devices: dict[str, int] = {**dict(zip(split, counts, strict=True)), **kept}
            if takes_turns:
                devices["rollout"] = devices["critic"]
            yield from (Place(schedule, devices, host, *rollout) for host in hosts)


class _Predictor:
    """Predicts the step of a run in any placement, and the memory of its ranks, which does not depend on schedules."""

    def __init__(self, config: Config, times: Mapping[str, PhaseTimes], slowdown: float, idle_s: float) -> None:
        self._config = config
        self._times = times
        self._slowdown = slowdown
        self._idle_s = idle_s
        self._estimated: dict[object, dict[str, GroupMemory]] = {}

    def plan(
        self, place: Place, memory: Mapping[str, float | None], *, is_measured: bool = True, critic_size: float = 1.0
    ) -> Plan:
        """Predicts the step of a placement: scales the measured seconds of each phase to it, and rehearses a step.

        Phases that this placement does not have are left out. Weights are published for a rollout group or to be saved,
        and loaded ("sync") by a rollout group. The critic's phases take `critic_size` times their measured seconds.
        """
        parts = rows_of(self._config, place.share)
        has_group = parts["gen_rollout"] > 0.0
        saves_weights = self._config.checkpoint.weights_save_freq > 0
        parts |= {"sync": float(has_group), "publish": float(has_group or saves_weights)}
        phase_s = {}
        laws = set()
        for name, times in self._times.items():
            if (rows := parts.get(name, 1.0)) == 0.0:  # of another run, or of another share
                continue
            host = place.reference if name == "ref" else host_of(self._config, name)
            whole_s, law = times.on(place.devices_of(host or ""))
            phase_s[name] = whole_s * times.factor(rows) * (critic_size if name in CRITIC_PHASES else 1.0)
            laws.add(law)
        flow = Dataflow(
            place.layout,
            reference=place.reference,
            reward_model=self._config.reward_model_host,
            teacher=self._config.teacher_host,
            num_parts=int(self._config.rollout.stream_groups),
            rollout_share=parts["gen_rollout"],
            takes_turns=place.takes_turns,
            staleness=self._config.rollout.staleness,
        )
        seconds = Seconds(phase_s, self._idle_s, response_share(self._config), self._slowdown)
        predicted = step_time(flow, seconds)
        bubbles = {pool: share for pool, share in predicted.bubbles.items() if pool in place.devices}
        return Plan(
            **vars(place),
            step_s=predicted.step_s,
            bubbles=bubbles,
            memory_gib=memory,
            laws=tuple(sorted(laws - {""})),
            is_measured=is_measured,
        )

    def memory_of(self, place: Place) -> dict[str, float | None]:
        """Returns the peak memory of a rank of each group in GiB; ConfigError if this placement is not possible."""
        counts = {role: place.devices_of(role) for role in self._config.roles}
        key = (*counts.values(), place.reference)
        if key not in self._estimated:
            self._estimated[key] = self._groups(place)
        groups = self._estimated[key]
        trained = self._config.trained_roles
        peaks = {role: group.peak.total / GIB for role, group in groups.items()}
        gib: dict[str, float | None] = {role: peaks.get(role) for role in counts}
        if place.layout != "colocated":
            return gib
        # As `--check` adds them up: neither group gives its memory back to the other one.
        shared = sum(peaks[role] for role in trained) if groups.keys() >= {*trained} else None
        return {"all": shared, **{role: gib[role] for role in gib if role not in trained}}

    def _groups(self, place: Place) -> dict[str, GroupMemory]:
        config = placed(self._config, place)
        batch_plan(config)
        return {group.role: group for group in memory_plan(config, {}).groups}
