"""Computes the metrics of a step from arrays, timings and spans; `splitppo.run_folder.metrics` declares their names.

B responses, T response tokens, right-padded. A metric over nothing (no token, no response) is left out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.ppo.experience import Experience, monte_carlo_returns
from controller.ppo.masked_stats import Floats, Mask, variance
from controller.ppo.scores import Scores, is_numeric
from rewards.code.limits import CODE_LIMIT, Limit
from rewards.samples import Failure
from rewards.scorers.symbolic import SYMBOLIC, SymbolicOutcome
from splitppo.balance import attention_cost, partition
from splitppo.config import DataConfig
from splitppo.run_folder.metrics import MC_EXPLAINED_VARIANCE
from splitppo.run_folder.spans import Span, busy_s

Counts = NDArray[np.integer[Any]]

ENGINE_POOLS = ("actor", "critic", "reward", "rollout")


def learning_metrics(experience: Experience) -> dict[str, float]:
    """Computes critic/...: mean, max and min of scores, rewards, advantages, returns, and values if there is a critic.

    Scores and rewards are those of all responses. The other metrics are over the tokens that are learned from.
    """
    learned_N = experience.learned.values
    batch = experience.batch
    advantages_N = _where(learned_N, batch["advantages"].values)
    returns_N = _where(learned_N, batch["returns"].values)
    metrics = {
        **_mean_max_min("critic/score", experience.scores),
        **_mean_max_min("critic/rewards", experience.rewards.sums()),
        **_mean_max_min("critic/advantages", advantages_N),
        **_mean_max_min("critic/returns", returns_N),
    }
    if "values" in batch and len(returns_N):
        values_N = _where(learned_N, batch["values"].values)
        metrics |= _mean_max_min("critic/values", values_N)
        metrics["critic/vf_explained_var"] = explained_variance(values_N, returns_N)
        metrics[MC_EXPLAINED_VARIANCE] = explained_variance(
            values_N, _where(learned_N, monte_carlo_returns(experience))
        )
    return metrics


def _where(mask_N: Mask, values_N: Floats) -> Floats:
    """Selects the values where the mask is True; returns the array itself if the mask is True everywhere."""
    return values_N if mask_N.all() else values_N[mask_N]


def explained_variance(values_N: Floats, returns_N: Floats) -> float:
    """Computes 1 - var(returns - values) / (var(returns) + 1e-5): 1 for perfect values, <= 0 for useless ones."""
    residual = variance(np.subtract(returns_N, values_N, dtype=np.float64))
    return float(explained_share(residual, variance(returns_N)))


def explained_share(residual: Any, spread: Any) -> Any:
    """Computes the explained variance from the variances of returns - values and of returns: numbers or arrays."""
    return 1.0 - residual / (spread + 1e-5)


def length_metrics(
    prompt_lengths_B: Counts, response_lengths_B: Counts, has_eos_B: Mask, limits: DataConfig
) -> dict[str, float]:
    """Computes prompt_length/..., response_length/... and response/...; `has_eos_B`: responses that end with EOS."""
    if not len(response_lengths_B):
        return {}
    lengths = {
        "response_length": (response_lengths_B, limits.max_response_length),
        "response_length_non_aborted": (response_lengths_B[response_lengths_B > 0], limits.max_response_length),
        "prompt_length": (prompt_lengths_B, limits.max_prompt_length),
    }
    metrics: dict[str, float] = {}
    for name, (lengths_R, limit) in lengths.items():
        if len(lengths_R):
            metrics |= _mean_max_min(name, lengths_R)
            metrics[f"{name}/clip_ratio"] = float(np.mean(lengths_R >= limit))
    return metrics | {
        "response/aborted_ratio": float(np.mean(response_lengths_B == 0)),
        "response/no_eos_ratio": float(1.0 - np.mean(has_eos_B)),
    }


def balance_metrics(lengths_B: Counts, num_ranks: int) -> dict[str, float]:
    """Computes global_seqlen/...: tokens per rank, for rows split in order, and split by balanced cost."""
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
    """Computes reward_extra/...: mean, max, min of each numeric field of the scorers' dicts, without None and text."""
    metrics: dict[str, float] = {}
    for field, values in extra.items():
        numbers = [float(value) for value in values if is_numeric(value)]
        metrics |= _mean_max_min(f"reward_extra/{field}", np.array(numbers))
    return metrics


def code_limit_metrics(extra: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """Computes reward/code_over_...: how many programs exceeded each limit; {} if no response is a program."""
    if CODE_LIMIT not in extra:
        return {}
    return {f"reward/code_over_{limit.value}": float(extra[CODE_LIMIT].count(limit.value)) for limit in Limit}


def symbolic_metrics(extra: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """Computes reward/symbolic_...: how many answers sympy did not compare: it was too slow, or not called."""
    outcomes = extra.get(SYMBOLIC, ())
    return {f"reward/symbolic_{outcome.value}": float(outcomes.count(outcome.value)) for outcome in SymbolicOutcome}


def reward_model_metrics(scores: Scores) -> dict[str, float]:
    """Computes reward/rule/... and reward/model/... from the two parts of the scores; {} without a reward model."""
    if scores.model_scores is None:
        return {}
    rule = _mean_max_min("reward/rule", scores.rule_scores[~np.isnan(scores.rule_scores)])
    return rule | _mean_max_min("reward/model", scores.model_scores)


def reward_metrics(scores: Scores) -> dict[str, float]:
    """Computes reward_extra/... and reward/...: fields and failures of scorers, and with a reward model both parts."""
    extra = scores.extra_columns
    failures = Counter(scores.failures)
    metrics = {f"reward/num_{failure.value}": float(failures[failure]) for failure in Failure}
    metrics |= reward_extra_metrics(extra) | code_limit_metrics(extra) | symbolic_metrics(extra)
    return metrics | reward_model_metrics(scores)


def timing_metrics(
    timings_s: Mapping[str, float], *, num_response_tokens: int, num_tokens: int, step_s: float, num_ranks: int
) -> dict[str, float]:
    """Computes timing_s/..., timing_per_token_ms/... and perf/... from the seconds of a step's parts and of the step.

    `num_tokens` counts tokens of prompts and responses, `num_ranks` the processes (GPUs) of all pools;
    groups that take turns on devices count once.
    """
    metrics = {f"timing_s/{name}": seconds for name, seconds in {**timings_s, "step": step_s}.items()}
    for name in ("gen", "ref", "teacher", "values", "adv", "update_critic", "update_actor"):
        tokens = num_response_tokens if name == "gen" else num_tokens
        if name in timings_s and tokens:
            metrics[f"timing_per_token_ms/{name}"] = timings_s[name] * 1e3 / tokens
    metrics["perf/total_num_tokens"] = float(num_tokens)
    metrics["perf/time_per_step"] = step_s
    if step_s > 0.0:
        metrics["perf/throughput"] = num_tokens / (step_s * num_ranks)
    return metrics


def overlap_metrics(
    spans: Sequence[Span], *, step: int, started_s: float, step_s: float, takes_turns: bool = False
) -> dict[str, float]:
    """Computes overlap/...: the shares of a step's time in which the pools worked at the same time, or were idle.

    `spans` has all work of the worker groups in the step's own time, also for neighbouring steps (an overlapped critic
    update runs into the next step), and both updates of the step, also if they end later. Only calls of the step count,
    and not, for instance, a checkpoint. An empty interval has no metrics; a pool without spans has none either. If
    critic and rollout group take turns on their devices, the spans of both are those of one pool, the critic's.
    """
    finished_s = started_s + step_s
    calls = [span for span in spans if span.is_call and span.pool in ENGINE_POOLS]
    if takes_turns:
        calls = [replace(span, pool="critic") if span.pool == "rollout" else span for span in calls]
    if not calls or step_s <= 0.0:
        return {}
    metrics = {"overlap/idle_fraction": 1.0 - busy_s(calls, started_s, finished_s) / step_s}
    for pool in ENGINE_POOLS:
        own = [span for span in calls if span.pool == pool]
        if own:
            metrics[f"overlap/bubble_{pool}"] = 1.0 - busy_s(own, started_s, finished_s) / step_s
    actor = [span for span in calls if span.step == step and span.name == "update_actor"]
    critic = [span for span in calls if span.step == step and span.name == "update_critic"]
    if actor and critic:
        metrics["overlap/efficiency"] = hidden_share(actor, critic)
    return metrics


def hidden_share(actor: Sequence[Span], critic: Sequence[Span]) -> float:
    """Computes the share of the shorter update that the longer one hides, in [0, 1]; 0 for an update without length.

        share = (t_actor + t_critic - t_wall) / min(t_actor, t_critic)

    t_wall is the time from the first start of the two updates to their last end.
    """
    updates = [*actor, *critic]
    t_wall = max(span.finished_s for span in updates) - min(span.started_s for span in updates)
    t_actor = sum(span.duration_s for span in actor)
    t_critic = sum(span.duration_s for span in critic)
    shorter = min(t_actor, t_critic)
    if shorter <= 0.0:
        return 0.0
    return min(max((t_actor + t_critic - t_wall) / shorter, 0.0), 1.0)


def _mean_max_min(name: str, values: NDArray[Any]) -> dict[str, float]:
    """Computes mean, max and min of values as metrics `name`/mean, /max and /min; {} without values."""
    if not values.size:
        return {}
    return {
        f"{name}/mean": float(np.mean(values, dtype=np.float64)),
        f"{name}/max": float(np.max(values)),
        f"{name}/min": float(np.min(values)),
    }
