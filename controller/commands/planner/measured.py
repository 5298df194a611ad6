"""Measures a finished run: the median seconds of each phase of a step, and the number of devices of each group."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from pathlib import Path
from statistics import median
from typing import Any

from splitppo.config import Config, ConfigError, load_config
from splitppo.config.section import RoleName
from splitppo.config_error import config_errors
from splitppo.run_folder.spans import Span, busy_s
from splitppo.run_folder.step_file import METRICS_FILE, read_metrics
from splitppo.run_folder.trace import TRACE_FILE, read_trace

# Spans with these names are the phases of a step. The reward processes work in "score", the controller in "adv"; the
# actor publishes weights, and a rollout group loads them ("sync") and samples ("gen_rollout").
_EXPERIENCE = ("gen", "gen_rollout", "old_log_prob", "ref", "teacher", "values", "reward_model", "score", "adv")
PHASES = ("sync", *_EXPERIENCE, "update_actor", "update_critic", "publish")
_HOSTS: Mapping[str, RoleName] = {
    **dict.fromkeys(("sync", "gen_rollout"), "rollout"),
    **dict.fromkeys(("gen", "old_log_prob", "update_actor", "publish"), "actor"),
    **dict.fromkeys(("values", "update_critic"), "critic"),
}
# A probe of new weights delays what its group does next.
_COUNTED_AS = {
    ("rollout", "gen"): "gen_rollout",
    ("rollout", "probe"): "sync",
    ("actor", "probe"): "old_log_prob",
}
# Groups that may work at the same time.
ENGINES = frozenset({"actor", "critic", "rollout"})
_FIRST_STEPS = 1  # slower than the rest: left out if there are more
_ACTOR_LEARNED = "actor/lr"  # a metric of every step that trains the policy


@dataclass(frozen=True)
class Measurement:
    """The median training step of one run, phase by phase.

    Attributes:
        phase_s: median seconds of each phase. The parts of a phase are added up, and a step without the phase counts as
            0 s. Phases with a median of 0 s are left out.
        shared_s: the median seconds of each phase of the actor, critic and rollout group in which another one of these
            groups worked at the same time.
        idle_s: median seconds of a step in which no group worked: transfers and calls outside all phases.
        step_s: median wall time of a step.
        num_steps: the number of steps behind the medians.
        devices: the number of GPUs of each group; on a CPU, its number of threads.
    """

    config: Config
    phase_s: Mapping[str, float]
    shared_s: Mapping[str, float]
    idle_s: float
    step_s: float
    num_steps: int
    devices: Mapping[str, int]

    def device_count_of(self, phase: str) -> int:
        """Returns the number of devices that computed a phase; 0 for a phase on the controller's machine."""
        host = host_of(self.config, phase)
        return self.devices[host] if host else 0

    @property
    def share(self) -> float:
        """The share of the prompts that a rollout group answered; 0 if the actor's group answered all."""
        return float(self.config.rollout.share) if "rollout" in self.config.sampling_roles else 0.0


def rows_of(config: Config, share: float) -> dict[str, float]:
    """Returns the part of a step's responses that actor ("gen") and rollout group ("gen_rollout") sample, 0 to 1."""
    num_prompts = config.data.train_batch_size
    by_group = floor(num_prompts * share) / num_prompts
    return {"gen": 1.0 - by_group, "gen_rollout": by_group}


def host_of(config: Config, phase: str) -> RoleName | None:
    """Returns the role whose worker group computes a phase; None for the controller and its reward processes."""
    frozen = {"ref": config.reference_host, "reward_model": config.reward_model_host, "teacher": config.teacher_host}
    return frozen[phase] if phase in frozen else _HOSTS.get(phase)


def read_measurement(run_dir: Path) -> Measurement:
    """Measures the run whose files are in a run folder.

    Raises:
        ConfigError: the folder is not a run folder, another version wrote it, or it holds no step.
    """
    config_file = run_dir / "config.yaml"
    if not config_file.exists():
        raise ConfigError(f"{run_dir} is no run folder: expected config.yaml and {METRICS_FILE} in it")
    with config_errors(ConfigError, before=f"{run_dir} was left by another version: "):
        config = load_config(config_file, is_stored=True)
    lines = [line for line in read_metrics(run_dir / METRICS_FILE) if line["step"] > 0]
    if not lines:
        raise ConfigError(f"{run_dir} holds no step: expected a line with a step from 1 on in {METRICS_FILE}")
    return measurement_of(config, [(lines, read_trace(run_dir / TRACE_FILE))], source=str(run_dir))


def measurement_of(
    config: Config, blocks: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[Span]]], *, source: str
) -> Measurement:
    """Computes the median step from the metrics and trace spans of one or more blocks of steps.

    Args:
        config: the configuration of the run.
        blocks: (lines of metrics, spans) of each block. The first step of a block, which is slower, is left out if the
            block has more steps; so are steps of the critic's warm-up if others come after them, because only the
            others train the policy, and the critic for `ppo_epochs`.
        source: the name of the run in errors.

    Raises:
        ConfigError: no step has both timing_s/step and spans.
    """
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    shared: defaultdict[str, list[float]] = defaultdict(list)
    for lines, timeline in blocks:
        spans = [replace(span, name=_COUNTED_AS.get((span.pool, span.name), span.name)) for span in timeline]
        for line in _steady(lines, config):
            own = [span for span in spans if span.step == line["step"] and span.name in PHASES]
            if not own or "timing_s/step" not in line:
                continue
            seconds["step"].append(line["timing_s/step"])
            started_s = min(span.started_s for span in own)
            # With `overlap` the critic's update falls into the time of the next step.
            seconds["idle"].append(_idle_s(own, spans, started_s, started_s + line["timing_s/step"]))
            for name in PHASES:
                parts = [span for span in own if span.name == name]
                seconds[name].append(sum(span.duration_s for span in parts))
                shared[name].append(sum(_shared_s(span, spans) for span in parts))
    if not seconds["step"]:
        raise ConfigError(
            f"{source} holds no step that can be used: expected timing_s/step, and its spans in trace.json"
        )
    medians = {name: median(values) for name, values in seconds.items()}
    phase_s = {name: medians[name] for name in PHASES if medians[name] > 0.0}
    shared_s = {name: median(shared[name]) for name in phase_s}
    devices: dict[str, int] = {role: _devices(config, role) for role in config.roles}
    return Measurement(config, phase_s, shared_s, medians["idle"], medians["step"], len(seconds["step"]), devices)


def _steady(lines: Sequence[Mapping[str, Any]], config: Config) -> Sequence[Mapping[str, Any]]:
    """Returns the lines of a block of steps, without the first and without the critic's warm-up; see `measurement_of`.

    The warm-up may end before `critic.warmup_steps` (`critic.warmup_until`); then steps that train the policy tell it.
    """
    later = lines[_FIRST_STEPS:] or lines
    trained = [line for line in later if line["step"] > config.num_warmup_steps or _ACTOR_LEARNED in line]
    return trained or later


def _idle_s(own: Sequence[Span], spans: Sequence[Span], started_s: float, finished_s: float) -> float:
    """Returns the seconds of a step in which no worker group worked, not even for the step before or after."""
    steps = (own[0].step - 1, own[0].step, own[0].step + 1)
    working = [span for span in spans if span.step in steps and span.name in PHASES]
    return finished_s - started_s - busy_s(working, started_s, finished_s)


def _shared_s(span: Span, spans: Sequence[Span]) -> float:
    """Returns the seconds of a span of one of ENGINES in which another one works, too; 0 for spans of other pools."""
    others = ENGINES - {span.pool} if span.pool in ENGINES else ()
    working = (other for other in spans if other.pool in others and other.name in PHASES)
    return busy_s(working, span.started_s, span.finished_s)


def _devices(config: Config, role: RoleName) -> int:
    service = config.services.of(role)
    threads = 1 if service.devices or service.threads == "auto" else int(service.threads)
    return service.num_processes * threads
