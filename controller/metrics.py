"""The names of all metrics, with meaning and unit; a name that is not declared here is an error.

`{a,b}` in a declaration stands for each of its words, `<x>` for any text. Dashboards exist: names are never renamed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeGuard


@dataclass(frozen=True)
class Metric:
    """A declared metric, or a family of them.

    Attributes:
        names: with `{a,b}` and `<x>` as the module says.
        unit: "1" for shares, ratios and plain numbers.
        meaning: of one step's value, unless it says otherwise.
    """

    names: str
    unit: str
    meaning: str


METRICS: tuple[Metric, ...] = (
    # What the policy earned and what the critic thought of it.
    Metric("critic/score/{mean,max,min}", "1", "score of a response, before the KL penalty"),
    Metric("critic/rewards/{mean,max,min}", "1", "sum of a response's token rewards, KL penalty included"),
    Metric("critic/advantages/{mean,max,min}", "1", "advantage of a response token, as the loss sees it"),
    Metric("critic/returns/{mean,max,min}", "1", "return of a response token"),
    Metric("critic/values/{mean,max,min}", "1", "value of the state before a response token"),
    Metric("critic/vf_explained_var", "1", "1 - var(returns - values) / var(returns)"),
    Metric("reward_extra/<field>/{mean,max,min}", "1", "numeric field of the scorers' dicts, over the responses"),
    Metric("reward/{num_timeouts,num_crashes,num_errors}", "calls", "calls of the reward function that gave no score"),
    # The updates.
    Metric("{actor,critic}/grad_norm", "1", "global gradient norm before clipping, mean over optimiser steps"),
    Metric("{actor,critic}/lr", "1", "learning rate"),
    Metric("{actor,critic}/loss", "1", "what was minimised"),
    Metric("{actor,critic}/num_skipped_steps", "steps", "optimiser steps skipped for a gradient that was not finite"),
    Metric("{actor,critic}/num_empty_steps", "steps", "optimiser steps left out because every token was rejected"),
    Metric("{actor,critic}/tokens_rank_{min,max,mean}", "tokens", "tokens that one rank trained on"),
    Metric("actor/pg_loss", "1", "policy loss"),
    Metric("actor/{pg_clipfrac,pg_clipfrac_lower}", "1", "share of tokens at the clip, and at the dual clip"),
    Metric("actor/ppo_kl", "nats", "KL of the policy from the one that sampled, k1 estimate"),
    Metric("actor/entropy", "nats", "entropy per token"),
    Metric("actor/{kl_loss,kl_coef}", "nats, 1", "KL to the reference in the loss, and its weight"),
    Metric(
        "actor/reward_kl_penalty", "nats", "KL to the reference in the reward: mean over rows of the mean over tokens"
    ),
    Metric("actor/reward_kl_penalty_coeff", "1", "its coefficient in this step"),
    Metric("critic/vf_loss", "1", "value loss"),
    Metric("critic/vf_clipfrac", "1", "share of tokens whose value is clipped"),
    Metric("critic/vpred_mean", "1", "mean value during the update"),
    # What was generated.
    Metric("response_length/{mean,max,min}", "tokens", "length of a response"),
    Metric("response_length/clip_ratio", "1", "share of responses as long as is allowed"),
    Metric("prompt_length/{mean,max,min}", "tokens", "length of a prompt, over responses"),
    Metric("prompt_length/clip_ratio", "1", "share of prompts as long as is allowed"),
    Metric("response/aborted_ratio", "1", "share of responses without any token"),
    Metric("response/no_eos_ratio", "1", "share of responses that do not end with an EOS token"),
    Metric("global_seqlen/{min,max,minmax_diff}", "tokens", "tokens per rank, were rows dealt out in order"),
    Metric("global_seqlen/{balanced_min,balanced_max,mean}", "tokens", "tokens per rank, balanced"),
    # Rollout engine and trainer; their ratio r is trainer's probability of a sampled token / rollout engine's.
    Metric("training/rollout_probs_diff_{max,mean,std}", "1", "|probability by the trainer - by the rollout engine|"),
    Metric("training/rollout_log_probs_diff_{max,mean}", "nats", "|log-prob by the trainer - by the rollout engine|"),
    Metric("training/rollout_actor_probs_pearson_corr", "1", "correlation of the two probabilities over tokens"),
    Metric("rollout_corr/{kl,k3_kl}", "nats", "KL of the rollout engine from the trainer, k1 and k3 estimates"),
    Metric("rollout_corr/{training_ppl,rollout_ppl}", "1", "perplexity of a response, by trainer and rollout engine"),
    Metric("rollout_corr/{training_log_ppl,rollout_log_ppl}", "nats", "minus the mean log-prob of a response's tokens"),
    Metric("rollout_corr/log_ppl_{diff,abs_diff,diff_max,diff_min}", "nats", "of a response: trainer - rollout engine"),
    Metric("rollout_corr/ppl_ratio", "1", "of a response: perplexity by the trainer / by the rollout engine"),
    Metric("rollout_corr/{chi2_token,chi2_seq}", "1", "mean r^2 - 1, r of a token or its product over a response"),
    Metric("rollout_corr/rollout_is_{mean,max,min,std}", "1", "importance weight of a token, before truncation"),
    Metric(
        "rollout_corr/rollout_is_ratio_fraction_{high,low}",
        "1",
        "share of weights over the threshold, and under its reciprocal",
    ),
    Metric("rollout_corr/rollout_is_eff_sample_size", "1", "share of tokens that weigh as much if weighted equally"),
    Metric("rollout_corr/rollout_is_seq_{mean,std,max,min,max_deviation}", "1", "mean weight of a response's tokens"),
    Metric("rollout_corr/rollout_is_seq_fraction_{high,low}", "1", "share of responses whose mean weight is beyond"),
    Metric("rollout_corr/rollout_is_batch_norm_factor", "1", "what the truncated weights are divided by"),
    Metric("rollout_corr/rollout_rs_masked_fraction", "1", "share of tokens that are rejected"),
    Metric("rollout_corr/rollout_rs_seq_masked_fraction", "1", "share of responses that lose a token"),
    Metric(
        "rollout_corr/rollout_rs_<option>_{mean,max,min,std,fraction_high,fraction_low,seq_mean,seq_std,seq_max,seq_min,"
        "seq_max_deviation,seq_fraction_high,seq_fraction_low,masked_fraction,seq_masked_fraction}",
        "nats, 1",
        "the statistic of one criterion over tokens and (seq_) responses, shares beyond its bounds, shares rejected",
    ),
    # Time.
    Metric(
        "timing_s/{step,gen,reward,old_log_prob,ref,values,adv,update_actor,update_critic,update_actor_critic,"
        "testing,save_checkpoint,stall_critic}",
        "s",
        "seconds that the controller spent in this part; parts may run at the same time",
    ),
    Metric(
        "timing_s/update_weights",
        "s",
        "of gen or testing, whichever came first after an update: the rollout engine takes over the policy's weights",
    ),
    Metric(
        "timing_per_token_ms/{gen,ref,values,adv,update_critic,update_actor}",
        "ms",
        "milliseconds per response token (gen) or per prompt and response token (the others)",
    ),
    Metric("perf/total_num_tokens", "tokens", "prompt and response tokens of the step"),
    Metric("perf/time_per_step", "s", "wall time of the step, without validation and checkpoints"),
    Metric("perf/throughput", "tokens/s", "tokens per second and rank"),
    Metric(
        "perf/mfu/{actor,critic}",
        "1",
        "model FLOPs of the update / (its seconds x the peak of the group's GPUs); absent on CPUs, and for GPUs and"
        " models that services/engine/flops.py does not know",
    ),
    Metric(
        "perf/{max_memory_allocated_gb,max_memory_reserved_gb,cpu_memory_used_gb}",
        "GiB",
        "memory of the actor's rank 0: highest use of its GPU so far, and main memory in use on its machine",
    ),
    Metric("overlap/efficiency", "1", "share of the shorter update that the longer one hid"),
    Metric(
        "overlap/{bubble_actor,bubble_critic}",
        "1",
        "share of step time in which no call ran in the pool's engine",
    ),
    Metric("overlap/idle_fraction", "1", "share of step time in which no call ran in any engine"),
    Metric("rpc/{bytes_sent,bytes_received}", "bytes", "columns sent to and received from the services"),
    Metric("rpc/time_fraction", "1", "share of step time in which columns were on the wire"),
    Metric("recovery/num_restarts", "1", "times that lost groups were restarted, so far in this process"),
    Metric("recovery/num_repeated_steps", "steps", "recorded steps that were done again after that"),
    # The run.
    Metric("training/{global_step,epoch}", "1", "step, and passes over the training prompts begun before it"),
    Metric("val/accuracy", "1", "mean over all validation responses of acc, or of the reward where there is no acc"),
    Metric("val-core/<source>/<variable>/mean@<n>", "1", "mean over n responses per prompt, then over prompts"),
    Metric(
        "val-aux/<source>/<variable>/{mean,std}@<n>", "1", "mean and deviation of n responses per prompt, over prompts"
    ),
    Metric(
        "val-aux/<source>/<variable>/{best,worst,maj}@<n>/{mean,std}",
        "1",
        "best, worst and majority's value of n responses, bootstrapped, over prompts",
    ),
)


def declaration(name: str) -> Metric:
    """The declaration that covers a name.

    Raises:
        ValueError: the name is not declared.
    """
    fixed, families = _index()
    if name in fixed:
        return fixed[name]
    for pattern, metric in families:
        if pattern.fullmatch(name):
            return metric
    raise ValueError(f"metric {name!r} is not declared in controller/metrics.py")


def check_declared(names: Iterable[str]) -> None:
    """ValueError if one of the names is not declared."""
    for name in names:
        declaration(name)


def is_numeric(value: object) -> TypeGuard[float]:
    """Whether a scorer's field can be a metric."""
    return isinstance(value, bool | int | float)


@lru_cache(maxsize=1)
def _index() -> tuple[Mapping[str, Metric], Sequence[tuple[re.Pattern[str], Metric]]]:
    """Plain names by look-up, and families by pattern."""
    fixed: dict[str, Metric] = {}
    families: list[tuple[re.Pattern[str], Metric]] = []
    for metric in METRICS:
        for name in _spelt_out(metric.names):
            if "<" in name:
                pieces = (re.escape(piece) for piece in re.split(r"<\w+>", name))
                families.append((re.compile(".+".join(pieces)), metric))
            else:
                fixed[name] = metric
    return fixed, families


def _spelt_out(names: str) -> Iterable[str]:
    """All names that `{a,b}` stands for."""
    pieces = re.split(r"\{([^}]*)\}", names)
    choices = [piece.split(",") if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return ("".join(choice) for choice in itertools.product(*choices))
