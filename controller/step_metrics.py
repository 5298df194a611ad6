"""The metrics of a step, from its arrays, timings and spans; names are declared in controller/metrics.py.

B responses, T response tokens, right-padded. A metric over nothing (no token, no response) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.metrics import is_numeric
from controller.trace import Span, busy_s
from splitppo.balance import attention_cost, partition

Floats = NDArray[np.floating[Any]]
Counts = NDArray[np.integer[Any]]
Mask = NDArray[np.bool_]

ENGINE_POOLS = ("actor", "critic")


def learning_metrics(
    scores_B: Floats,
    rewards_BT: Floats,
    advantages_BT: Floats,
    returns_BT: Floats,
    mask_BT: Mask,
    *,
    learned_BT: Mask | None = None,
    values_BT: Floats | None = None,
) -> dict[str, float]:
    """critic/...: what the policy earned, and what the critic expected if there is one.

    Rewards are those of all tokens in `mask_BT`; the rest is over `learned_BT`, by default the same.
    """
    learned_BT = mask_BT if learned_BT is None else learned_BT
    metrics = {
        **_mean_max_min("critic/score", scores_B),
        **_mean_max_min("critic/rewards", np.where(mask_BT, rewards_BT, 0.0).sum(axis=1)),
        **_mean_max_min("critic/advantages", advantages_BT[learned_BT]),
        **_mean_max_min("critic/returns", returns_BT[learned_BT]),
    }
    if values_BT is not None:
        metrics |= _mean_max_min("critic/values", values_BT[learned_BT])
        if learned_BT.any():
            metrics["critic/vf_explained_var"] = explained_variance(values_BT[learned_BT], returns_BT[learned_BT])
    return metrics


def explained_variance(values_N: Floats, returns_N: Floats) -> float:
    """1 - var(returns - values) / (var(returns) + 1e-5): 1 for a perfect critic, at most 0 for a useless one."""
    values_f64, returns_f64 = values_N.astype(np.float64), returns_N.astype(np.float64)
    return float(1.0 - np.var(returns_f64 - values_f64) / (np.var(returns_f64) + 1e-5))


def length_metrics(
    prompt_lengths_B: Counts,
    response_lengths_B: Counts,
    ended_B: Mask,
    *,
    max_prompt_length: int,
    max_response_length: int,
) -> dict[str, float]:
    """prompt_length/..., response_length/... and response/...; `ended_B`: the response ends with an EOS token."""
    if not len(response_lengths_B):
        return {}
    return {
        **_mean_max_min("response_length", response_lengths_B),
        "response_length/clip_ratio": float(np.mean(response_lengths_B >= max_response_length)),
        **_mean_max_min("prompt_length", prompt_lengths_B),
        "prompt_length/clip_ratio": float(np.mean(prompt_lengths_B >= max_prompt_length)),
        "response/aborted_ratio": float(np.mean(response_lengths_B == 0)),
        "response/no_eos_ratio": float(1.0 - np.mean(ended_B)),
    }


def balance_metrics(lengths_B: Counts, num_ranks: int) -> dict[str, float]:
    """global_seqlen/...: tokens (prompt and response) per rank, dealt out in order and balanced."""
    in_order_R = [int(part.sum()) for part in np.array_split(lengths_B, num_ranks)]
    costs_B = attention_cost(lengths_B.astype(np.int32))
    balanced_R = [int(lengths_B[rows].sum()) for rows in partition(costs_B, num_ranks)]
    return {
        "global_seqlen/min": float(min(in_order_R)),
        "global_seqlen/max": float(max(in_order_R)),
        "global_seqlen/minmax_diff": float(max(in_order_R) - min(in_order_R)),
        "global_seqlen/balanced_min": float(min(balanced_R)),
        "global_seqlen/balanced_max": float(max(balanced_R)),
        "global_seqlen/mean": float(lengths_B.sum()) / num_ranks,
    }


def reward_extra_metrics(extra: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """reward_extra/...: the numeric fields that scorers returned; None and text are left out."""
    metrics: dict[str, float] = {}
    for field, values in extra.items():
        metrics |= _mean_max_min(f"reward_extra/{field}", np.array([float(v) for v in values if is_numeric(v)]))
    return metrics


def timing_metrics(
    timings_s: Mapping[str, float], *, num_response_tokens: int, num_tokens: int, step_s: float, num_ranks: int
) -> dict[str, float]:
    """timing_s/..., timing_per_token_ms/... and perf/...

    Args:
        timings_s: seconds per part of the step, without "step".
        num_response_tokens: all response tokens of the step.
        num_tokens: all prompt and response tokens of the step.
        step_s: wall time of the step.
        num_ranks: processes (GPUs) of all pools together.
    """
    metrics = {f"timing_s/{name}": seconds for name, seconds in timings_s.items()}
    metrics["timing_s/step"] = step_s
    for name in ("gen", "ref", "values", "adv", "update_critic", "update_actor"):
        tokens = num_response_tokens if name == "gen" else num_tokens
        if name in timings_s and tokens:
            metrics[f"timing_per_token_ms/{name}"] = timings_s[name] * 1e3 / tokens
    metrics["perf/total_num_tokens"] = float(num_tokens)
    metrics["perf/time_per_step"] = step_s
    if step_s > 0.0:
        metrics["perf/throughput"] = num_tokens / (step_s * num_ranks)
    return metrics


def overlap_metrics(spans: Sequence[Span], *, step: int, started_s: float, finished_s: float) -> dict[str, float]:
    """overlap/...: how well the two pools worked at the same time.

    Args:
        spans: the engines' work in the interval, neighbouring steps' included (an overlapped critic update runs into
            the next step), and both updates of this step, also where they end later. Other pools are ignored, and so
            is what a pool does beside the calls of steps: a checkpoint may be written during the next step.
        step: whose updates are compared.
        started_s: start of the step, on the clock of the spans.
        finished_s: its end.

    Returns:
        Without the critic's metrics if it has no span, and empty for an empty interval.
    """
    step_s = finished_s - started_s
    calls = [span for span in spans if span.is_call]
    by_pool = {pool: [span for span in calls if span.pool == pool] for pool in ENGINE_POOLS} if step_s > 0.0 else {}
    metrics = {
        f"overlap/bubble_{pool}": 1.0 - busy_s(own, started_s, finished_s) / step_s
        for pool, own in by_pool.items()
        if own
    }
    if metrics:
        everything = [span for own in by_pool.values() for span in own]
        metrics["overlap/idle_fraction"] = 1.0 - busy_s(everything, started_s, finished_s) / step_s
    updates = [
        [span for span in own if span.step == step and span.name == f"update_{pool}"] for pool, own in by_pool.items()
    ]
    if updates and all(updates):
        metrics["overlap/efficiency"] = overlap_efficiency(*updates)
    return metrics


def overlap_efficiency(actor: Sequence[Span], critic: Sequence[Span]) -> float:
    """(t_actor + t_critic - t_wall) / min(t_actor, t_critic) of the two updates, in [0, 1]: the share hidden.

    t_wall runs from the first start to the last end.
    """
    t_actor, t_critic = (sum(span.duration_s for span in spans) for spans in (actor, critic))
    both = [*actor, *critic]
    t_wall = max(span.finished_s for span in both) - min(span.started_s for span in both)
    shorter = min(t_actor, t_critic)
    return min(max((t_actor + t_critic - t_wall) / shorter, 0.0), 1.0) if shorter > 0.0 else 0.0


def _mean_max_min(name: str, values: NDArray[Any]) -> dict[str, float]:
    """Mean, max and min under `name`; nothing of nothing."""
    if not values.size:
        return {}
    return {
        f"{name}/mean": float(np.mean(values, dtype=np.float64)),
        f"{name}/max": float(np.max(values)),
        f"{name}/min": float(np.min(values)),
    }
