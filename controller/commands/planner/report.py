"""Prints the predicted step times of `python -m controller plan RUN_DIR`, as a table with explanation or as JSON."""

import json
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from controller.commands.planner.measured import Measurement, read_measurement
from controller.commands.planner.place import arguments, keys_of, placed
from controller.commands.planner.plans import Plan, Plans, make_plans
from controller.tracking.plain_text import columns
from splitppo.config import Config, ConfigError
from splitppo.config.resolve import auto_reference_host

_MAX_ROWS = 20
_WIDTH = 120


def run_plan(run_dirs: Sequence[Path], num_devices: int | None, *, as_json: bool) -> str:
    """Predicts step times from run folders and returns them as a table or as JSON text.

    Raises:
        ConfigError: a folder or the number of devices cannot be used.
    """
    plans = make_plans([read_measurement(run_dir) for run_dir in run_dirs], num_devices)
    return _as_json(plans) if as_json else _as_text(plans)


def _as_json(plans: Plans) -> str:
    """Returns the plans as JSON: the measured run, all layouts and rollout shares, those refused, and advice."""
    facts = {**vars(plans.measured)}
    config: Config = facts.pop("config")
    facts |= {"schedule": config.run.schedule, "reference": config.reference_host, "predicted_step_s": plans.fitted_s}
    content = {
        "measured": facts,
        "slowdown": plans.slowdown,
        "plans": [asdict(plan) for plan in plans.rows],
        "critic": None if plans.critic is None else asdict(plans.critic),
        "shares": [{key: vars(plan)[key] for key in ("share", "reference", "step_s")} for plan in plans.shares],
        "refused": plans.refused,
        "explanation": [*explain(plans)],
        "advice": {what: [*keys] for what, keys in advice(plans).items()},
    }
    return json.dumps(content, indent=1) + "\n"


def _as_text(plans: Plans) -> str:
    """Returns the plans for people: the measured run, a table of the fastest layouts, an explanation, keys to paste.

    The best split layout and the colocated one are in the table even if they are not among the fastest.
    """
    best_s = plans.rows[0].step_s
    shown = list(plans.rows[:_MAX_ROWS])
    shown += [row for row in (plans.best_split, plans.colocated) if row is not None and row not in shown]
    roles = ["actor", "critic", *(["rollout"] if "rollout" in plans.measured.devices else [])]
    head = ("step s", "vs best", "layout", *roles, "reference", "idle", "GiB", "seconds from")
    table = [head, *(_cells(row, best_s, roles) for row in shown)]
    lines = columns(table, gap=2)
    if (more := len(plans.rows) - len(shown)) > 0:
        lines.append(f"and {more} slower ones (--json lists all)")
    if plans.refused:
        lines.append(f"{len(plans.refused)} layouts are not possible, the first: {plans.refused[0]}")
    explanation = [textwrap.fill(sentence, _WIDTH) for sentence in explain(plans)]
    parts = [_measured(plans.measured, plans.fitted_s), lines, explanation, _pasted(advice(plans))]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def advice(plans: Plans) -> dict[str, Sequence[str]]:
    """Returns the keys of the layouts that the explanation compares, as arguments of the command line, by layout.

    They are those of the fastest layout, of the fastest split one, of the colocated one, and of the best share.
    """
    config = plans.measured.config
    chosen = {"the fastest layout": plans.rows[0]}
    named = {"the fastest split layout": plans.best_split, "the colocated layout": plans.colocated}
    chosen |= {what: row for what, row in named.items() if row is not None and row is not plans.rows[0]}
    found: dict[str, Sequence[str]] = {
        f"{what}, {row.layout}": arguments(keys_of(config, row)) for what, row in chosen.items()
    }
    if plans.shares and (best := best_share(plans)).share != plans.measured.share:
        with suppress(ConfigError):  # nobody has looked yet if this run can be placed so
            placed(config, best)
            found[f"rollout.share {best.share:.3g}"] = arguments(keys_of(config, best))
    return found


def best_share(plans: Plans) -> Plan:
    """Returns the fastest plan of the run's own layout with another value of `rollout.share`, or with its own."""
    return min(plans.shares, key=lambda plan: plan.step_s)


def _pasted(found: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns lines with the keys of each advised layout, wrapped so that a shell reads them as one command line."""
    lines = ["The keys, to paste behind `python -m controller --config FILE run.dir=NEW_FOLDER`:"]
    for what, keys in found.items():
        wrapped = textwrap.wrap(shlex.join(keys), _WIDTH - 4, break_long_words=False, break_on_hyphens=False)
        lines += [f"# {what}", " \\\n  ".join(wrapped)]
    return lines


def _measured(measured: Measurement, fitted_s: float) -> list[str]:
    """Returns lines about the run that was measured: its seconds per step and phase, and what its phases predict."""
    config = measured.config
    devices = " + ".join(f"{count} {role}" for role, count in measured.devices.items())
    host = f", reference on the {config.reference_host}" if config.reference_host else ""
    phases = ", ".join(f"{name} {seconds:.3g}" for name, seconds in measured.phase_s.items())
    host += f", rollout.share {measured.share:g}" if measured.share else ""
    sentences = (
        f"measured: {measured.step_s:.3g} s a step ({config.run.schedule}{host}, {devices}; median of"
        f" {measured.num_steps} steps); its phases give {fitted_s:.3g} s",
        f"seconds: {phases}, no group works {measured.idle_s:.3g}",
    )
    return [textwrap.fill(sentence, _WIDTH) for sentence in sentences]


def _cells(plan: Plan, best_s: float, roles: Sequence[str]) -> tuple[str, ...]:
    """Returns a plan's cells in the table of layouts, one for each name in the head; `roles` have a column each."""
    idle = " / ".join(f"{share:.0%}" for share in plan.bubbles.values())
    memory = " / ".join("?" if gib is None else f"{gib:.2f}" for gib in plan.memory_gib.values())
    return (
        f"{plan.step_s:.3g}",
        f"{plan.step_s / best_s:.2f}",
        plan.layout,
        *(str(plan.devices_of(role) or "-") for role in roles),
        plan.reference or "-",
        idle,
        memory,
        ", ".join(plan.laws) or ("measured" if plan.is_measured else "measured phases"),
    )


def explain(plans: Plans) -> Iterator[str]:
    """Yields sentences that explain the plans: split or colocated, measured or scaled, and the reference's host."""
    split = plans.best_split
    colocated = plans.colocated
    if split is not None and colocated is not None:
        yield _split_or_colocated(split, colocated, plans.error)
    if plans.slowdown > 1.0:
        yield f"in these runs work takes {plans.slowdown:.2f} times as long while the other group works, too."
    elif plans.measured.config.uses_critic or plans.measured.share:
        yield (
            "one schedule alone does not show how much parallel work slows each group down: name the folders of a"
            " serial run and of a run with another schedule."
        )
    yield from _laws(plans)
    if max_step_tokens := plans.measured.config.rollout.max_step_tokens:
        yield (
            f"rollout.max_step_tokens {max_step_tokens}: all steps are those of this number; what another one, or whole"
            " responses, would take is not predicted, but shown by a run with them."
        )
    if plans.critic is not None:
        yield str(plans.critic)
    if plans.measured.config.uses_reference:
        yield _reference(plans)
    if plans.shares:
        yield _share(plans)
    if plans.measured.share and not plans.measured.config.rollout_shares_devices:
        yield _rollout_devices(plans)


def _laws(plans: Plans) -> Iterator[str]:
    """Yields a sentence for each way in which the seconds of a phase on other devices are computed."""
    laws = {law for plan in plans.rows for law in plan.laws}
    if not all(plan.laws or plan.is_measured for plan in plans.rows):
        yield "measured phases: nobody has run this layout; its step is computed from phases measured on these devices."
    if "1/n" in laws:
        yield (
            "1/n: seconds were measured on one number of devices, and scaled as if all work were divided among devices;"
            " fixed costs make layouts on many devices slower than this. A run on another number of devices shows"
            " these costs: name its folder too."
        )
    if "a+b/n" in laws:
        yield "a+b/n: a fixed and a divided part, fitted to runs on several numbers of devices."


def _share(plans: Plans) -> str:
    """Returns a sentence about rollout.share: its value in the measured run, and the best one if that is faster.

    It also says what was assumed, or left out, because no run has measured it.
    """
    own = plans.measured
    best = best_share(plans)
    generation = plans.times["gen"]
    group = "" if own.share else " with services.rollout on the critic's devices"
    if best.reference != own.config.reference_host:
        group += " and the reference on the actor's"
    is_faster = best.step_s < plans.fitted_s * (1.0 - 1e-9)  # by more than rounding: the best may be this run's own
    if is_faster:
        verdict = f", best {best.share:.3g} in a new one{group}: {best.step_s:.3g} s instead of {plans.fitted_s:.3g} s"
    else:
        verdict = f" is the best{group}: {plans.fitted_s:.3g} s"
    half = f"half of the responses take {generation.factor(0.5):.2f} of the time of all"
    if generation.fixed is None:
        half += ", which is assumed: a run with another share shows it, name its folder too"
    unknown = "" if "sync" in plans.times else "; publish and sync, which no run has measured, are left out"
    return f"rollout.share: {own.share:.3g} in this run{verdict} a step (schedule {best.layout}; {half}{unknown})."


def _rollout_devices(plans: Plans) -> str:
    """Returns a sentence about the ratio of rollout GPUs to actor GPUs, in this run and in the fastest layout."""
    staleness = plans.measured.config.rollout.staleness
    best = plans.rows[0]
    own, shortest = (f"{of['rollout']} : {of['actor']}" for of in (plans.measured.devices, best.devices))
    return (
        f"rollout GPUs : actor GPUs (rollout.staleness {staleness}): {own} in this run,"
        f" {shortest} in the fastest layout, {best.step_s:.3g} s a step."
    )


def _reference(plans: Plans) -> str:
    """Returns a sentence about placement.reference: what `auto` chooses, and the best seconds with each host."""
    auto = f"placement.reference: auto is the {auto_reference_host(plans.measured.config)}"
    fastest: dict[str, float] = {}
    for row in plans.rows:
        if row.layout != "colocated" and row.reference is not None:
            fastest.setdefault(row.reference, row.step_s)
    if "critic" not in fastest:
        return f"{auto}: there is no critic."
    times = " and ".join(f"{step_s:.3g} s with the reference on the {host}" for host, step_s in sorted(fastest.items()))
    return f"{auto}; with devices of its own for each model, a step takes at best {times}."


def _split_or_colocated(split: Plan, colocated: Plan, error: float) -> str:
    """Returns the verdict about split against colocated placement, with its reason.

    They count as equally fast if they differ by no more than `error`, the relative error of the prediction for the run
    that was measured.
    """
    idle = " and ".join(f"the {pool} for {share:.0%}" for pool, share in split.bubbles.items())
    seconds = f"{split.step_s:.3g} s at best against {colocated.step_s:.3g} s"
    if abs(split.step_s - colocated.step_s) <= error * colocated.step_s:
        verdict = "as fast as"
        why = f"the prediction of the measured step is off by {error:.1%}, more than they differ"
    elif split.step_s > colocated.step_s:
        verdict = "slower than"
        why = f"it leaves {idle} of the step idle, while shared devices take one call after the other and never wait"
    else:
        verdict = "faster than"
        why = f"the groups gain more by parallel work than they lose while idle ({idle})"
    return f"split placement is {verdict} colocated ({seconds}): {why}{_memory(split, colocated)}."


def _memory(split: Plan, colocated: Plan) -> str:
    """Returns the end of a sentence that compares the memory of fullest devices; "" if an estimate is missing."""
    shared = colocated.memory_gib.get("all")
    own = [gib for gib in split.memory_gib.values() if gib is not None]
    if shared is None or not own:
        return ""
    return f"; it needs {max(own):.2f} GiB on the fullest device, colocated {shared:.2f}"
