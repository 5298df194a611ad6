"""What vLLM must do on every device: what ranks try out (scenarios), and what must be true of what they find (checks).

tests/vllm/test_any_device.py runs it on a CPU, tests/gpu/test_vllm_gpu.py on GPUs. Between the two only the device
differs, and what a CPU has not: a level of sleep, and memory that is given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from services.runtime.command import CommandCancelled
from splitppo.batch import Batch
from splitppo.config.resolve import MAX_LOG_PROB_DIFF, MAX_MEAN_LOG_PROB_DIFF
from tests.support.roles import RecordedProgress
from tests.vllm.inputs import NUM_PROMPTS, lists, make_experience, make_prompts
from tests.vllm.samplers import Actor

KV_CACHE_GB = 0.1
NUM_STEPS = 3
Ranks = Sequence[dict[str, Any]]


# Scenarios.


def sampled(actor: Actor, prompts: Batch) -> dict[str, Any]:
    """Samples one response for each prompt, and compares its log-probs with the trainer's."""
    rows, rollouts = actor.generate(prompts)
    diff = np.abs(actor.log_probs(rollouts) - rollouts["rollout_log_probs"].values)
    return {"rows": rows, "max": float(diff.max(initial=0.0)), "mean": float(diff.mean()) if diff.size else 0.0}


def afresh(actor: Actor, prompts: Batch, **sampling: Any) -> list[list[int]]:
    """Samples without cached prefixes, with which other kernels compute, and round differently."""
    assert actor.role._generation._backend._engine.reset_prefix_cache()
    return lists(actor.generate(prompts, **sampling)[1])


def learned(actor: Actor) -> dict[str, Any]:
    """Samples before and after updates, with new prompts each time."""
    steps = []
    for step in range(NUM_STEPS):
        if step:
            actor.update(make_experience(step))
        steps.append(sampled(actor, make_prompts(seed=step)))
    return {"steps": steps}


def not_synced(actor: Actor) -> dict[str, Any]:
    """Samples with the weights from before an update, under the number of the new version; not at sleep level 2."""
    actor.generate(make_prompts())
    actor.update(make_experience(20))
    backend = actor.role._generation._backend

    def lie(version: int) -> None:
        backend.policy_version = version

    backend.sync_weights = lie
    try:
        return sampled(actor, make_prompts())
    finally:
        del backend.sync_weights
        backend.policy_version = None


def behind_a_prefix(actor: Actor) -> dict[str, Any]:
    """Samples behind the same 300 tokens before and after an update: what was cached of them is not to be used."""
    steps = []
    for step in range(2):
        if step:
            actor.update(make_experience(30))
        steps.append(sampled(actor, make_prompts(prefix=300)))
    return {"steps": steps}


def rested(actor: Actor) -> dict[str, Any]:
    """Sleeps between generations of the same step, and samples again after another update."""
    steps, backend = [], actor.role._generation._backend
    for step in range(2):
        if step:
            actor.update(make_experience(40))
        before = afresh(actor, make_prompts(), temperature=0.0)
        free_bytes = free_bytes_of(actor.device)
        actor.role._generation.suspend()
        facts = {"is_asleep": backend._is_asleep, "freed": free_bytes_of(actor.device) - free_bytes}
        facts["has_weights"] = backend.policy_version == actor.step
        again = afresh(actor, make_prompts(), temperature=0.0)
        steps.append({**sampled(actor, make_prompts()), **facts, "before": before, "again": again})
    return {"steps": steps}


def free_bytes_of(device: torch.device) -> int:
    """The free memory of a GPU; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def sleep_on_a_cpu(actor: Actor) -> dict[str, Any]:
    """Lets the backend sleep on a CPU, too: what vLLM would drop is overwritten. For the scenarios after this one."""
    backend = actor.role._generation._backend
    engine = backend._engine
    runner = engine.model_executor.driver_worker.model_runner

    def sleep(level: int) -> None:
        assert engine.reset_prefix_cache()  # as vLLM does
        for cache in runner.kv_caches:
            cache.fill_(7.0)  # no NaN: attention on a CPU multiplies what it masks by 0
        for weight in runner.model.parameters() if level == 2 else ():
            weight.data.fill_(torch.nan)

    engine.sleep, engine.wake_up = sleep, lambda tags=None: None
    backend._sleeps = backend._settings.sleep_level > 0
    return {}


def seeded(actor: Actor) -> dict[str, Any]:
    """Samples four responses to each prompt twice with the same seeds, and once with others."""
    prompts, others = make_prompts(64, 4), make_prompts(64, 4, seed=1)
    others = Batch.from_rows(prompts=list(prompts["prompts"].rows()), seeds=list(others["seeds"].rows()))
    first, second, other = (afresh(actor, batch) for batch in (prompts, prompts, others))
    return {"first": first, "second": second, "other": other}


def cancelled(actor: Actor) -> dict[str, Any]:
    """Cancels a command after three reports; samples before and after, and cancels another one before an update."""
    prompts = make_prompts(NUM_PROMPTS, 4)
    before = afresh(actor, prompts)
    reports = reports_until_cancelled(actor, prompts)
    after = afresh(actor, prompts)
    reports_until_cancelled(actor, prompts)
    actor.update(make_experience(50))
    return {"reports": reports, "before": before, "after": after, "steps": [sampled(actor, make_prompts())]}


def reports_until_cancelled(actor: Actor, prompts: Batch) -> int:
    report = RecordedProgress(reports=3)
    try:
        actor.generate(prompts, report=report)
    except CommandCancelled:
        return report.num_reports
    return 0  # it was not cancelled


COMMON = (learned, behind_a_prefix, rested, seeded, cancelled)
SCENARIOS_OF_ANY_DEVICE = (sleep_on_a_cpu, not_synced, *COMMON)
NAMES = tuple(scenario.__name__ for scenario in COMMON)


# Checks: `ranks` are what each rank has found.


class Limits(NamedTuple):
    """The largest and the largest mean difference from the trainer's log-probs, in nats."""

    largest: float
    mean: float


def limits_of(dtype: str, ranks: Ranks) -> Limits:
    """Returns what a run demands of a dtype, or less: a fifth of what `ranks` have found with older weights."""
    stale = max(found["not_synced"]["mean"] for found in ranks)
    return Limits(MAX_LOG_PROB_DIFF[dtype], min(MAX_MEAN_LOG_PROB_DIFF[dtype], stale / 5))


def check_log_probs(steps: Sequence[dict[str, Any]], limits: Limits) -> None:
    assert max(step["max"] for step in steps) <= limits.largest, steps
    assert max(step["mean"] for step in steps) <= limits.mean, steps


def check_syncs(ranks: Ranks, limits: Limits) -> None:
    """Every prompt is answered, with the trainer's weights after each update."""
    for step in range(NUM_STEPS):
        answered = [row for found in ranks for row in found["learned"]["steps"][step]["rows"]]
        assert sorted(answered) == [*range(NUM_PROMPTS)]
    for found in ranks:
        check_log_probs(found["learned"]["steps"], limits)


def check_prefixes(ranks: Ranks, limits: Limits) -> None:
    """Nothing is left of a prefix that was computed with older weights."""
    for found in ranks:
        check_log_probs(found["behind_a_prefix"]["steps"], limits)


def check_rest(ranks: Ranks, limits: Limits, *, level: int, gives_back: int) -> None:
    """An engine goes on after its sleep, with the same weights and with new ones; it frees so many bytes at least."""
    for found in ranks:
        check_log_probs(found["rested"]["steps"], limits)
        for step in found["rested"]["steps"]:
            assert step["is_asleep"] == (level > 0)
            assert step["has_weights"] == (level != 2)
            assert step["freed"] >= gives_back
            assert step["before"] == step["again"]


def check_seeds(ranks: Ranks) -> None:
    """The same seeds give the same tokens, and other seeds give others."""
    for found in ranks:
        seeded = found["seeded"]
        assert seeded["first"] == seeded["second"]
        alike = [first == other for first, other in zip(seeded["first"], seeded["other"], strict=True)]
        assert np.mean(alike or [0.0]) < 0.2


def check_cancellation(ranks: Ranks, limits: Limits) -> None:
    """A cancelled command ends early, and the next one is as if it had never been, also after an update."""
    for found in ranks:
        cancelled = found["cancelled"]
        assert 0 < cancelled["reports"] < 16
        assert cancelled["before"] == cancelled["after"]
        check_log_probs(cancelled["steps"], limits)
