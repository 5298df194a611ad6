"""The one table of all metrics: name, unit, meaning, the runs and steps that have it, and the figures that draw it.

`{a,b}` in a name stands for each of its words, `<x>` for any text. Names never change, because dashboards use them.
What a run emits is checked against this table. The terminal, the report, the viewer and docs/metrics.md show metrics by
what stands here.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class Metric(NamedTuple):
    """A row of the table: a metric, or several whose names and meanings are alike.

    Attributes:
        names: the name, with `{a,b}` and `<x>`.
        unit: "1" for shares, ratios and plain numbers.
        meaning: that of one step's value, unless it says otherwise.
        when: which runs or steps have it; "" for every step of every run.
        label: what a curve of it is called; `{}` stands for what one `{a,b}` or `<x>` of the name is. "" for the name.
        terminal: what it is called on the terminal; "" if it is not shown there.
    """

    names: str
    unit: str
    meaning: str
    when: str = ""
    label: str = ""
    terminal: str = ""


SCORE = "critic/score/mean"
ACCURACY = "val/accuracy"
EXPLAINED_VARIANCE = "critic/vf_explained_var"
MC_EXPLAINED_VARIANCE = "critic/mc_explained_var"
STEP_S = "timing_s/step"
GLOBAL_STEP = "training/global_step"  # every step has it, so that a tracker's server knows its last step
# The KL of the policy from another one; of those that a step has, the first says most.
KL = ("distillation/kl", "actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl")

_SCORE = "score of a response, as it was given, that of its tokens included"
_REWARDS = "sum of a response's token rewards: shaped, KL penalty included"
_ACCURACY_OF_SOURCE = "val-core/<source>/<variable>/mean@<n>"

# The rows by section. A metric over nothing (no token, no response) is left out of a step.
METRICS: Mapping[str, Sequence[Metric]] = {
    "Rewards, advantages, values": (
        Metric(SCORE, "1", _SCORE, label="score", terminal="reward"),
        Metric("critic/score/{max,min}", "1", _SCORE),
        Metric(
            "critic/greedy_score/mean",
            "1",
            "score of the greedy rollout of a prompt, remax's baseline; no penalties",
            "algorithm.adv_estimator: remax",
        ),
        Metric("critic/rewards/mean", "1", _REWARDS, label="sum of token rewards"),
        Metric("critic/rewards/{max,min}", "1", _REWARDS),
        Metric("critic/advantages/{mean,max,min}", "1", "advantage of a response token, as the loss sees it"),
        Metric("critic/returns/{mean,max,min}", "1", "return of a response token", label="{} return"),
        Metric(
            "critic/values/{mean,max,min}",
            "1",
            "value of the state before a response token",
            "with a critic",
            label="{} value",
        ),
        Metric(
            "critic/value_norm/{mean,std}",
            "1",
            "of all returns so far, by which critic.normalize_values scales values",
            "critic.normalize_values",
        ),
        Metric(
            "critic/vf_explained_var",
            "1",
            "1 - var(returns - values) / var(returns), of the returns that it learns: below lambda 1 they hold values",
            "with a critic",
            label="of the returns that it learns",
        ),
        Metric(
            "critic/mc_explained_var",
            "1",
            "the same of Monte-Carlo returns: discounted sums of token rewards, before anything is learned from them",
            "with a critic",
            label="of Monte-Carlo returns",
        ),
        Metric(
            "reward_extra/<field>/{mean,max,min}",
            "1",
            "numeric field of the scorers' dicts, over the responses",
            "scorers that return dicts",
        ),
        Metric(
            "reward_extra/<scorer>_score/{mean,max,min}",
            "1",
            "score of one of several scorers that are added up",
            "several scorers that are added up",
        ),
        Metric(
            "reward_extra/{overlong_reward,overlong}/{mean,max,min}",
            "1",
            "with reward.overlong_buffer",
            "reward.overlong_buffer",
        ),
        Metric(
            "reward/running_std",
            "1",
            "deviation of all scores so far, by which reward.shaping.running_scale divides",
            "reward.shaping.running_scale",
        ),
        Metric(
            "reward/rule/{mean,max,min}",
            "1",
            "score by the scorers, where a reward model scores as well",
            "with a reward model",
        ),
        Metric(
            "reward/model/{mean,max,min}",
            "1",
            "score by the reward model, before its coefficient",
            "with a reward model",
        ),
        Metric(
            "reward/model_clip_ratio",
            "1",
            "share of rows as long as the reward model takes; longer ones were cut",
            "with a reward model",
        ),
        Metric(
            "reward/num_{timeouts,crashes,errors}", "responses", "without a score: a scorer took too long, died, raised"
        ),
        Metric(
            "reward/num_{unavailable,unparsable}", "responses", "without a score: the judge was away, or gave no mark"
        ),
        Metric("reward/symbolic_gave_up", "answers", "that sympy could not compare in time"),
        Metric("reward/symbolic_skipped", "answers", "that were compared by spelling alone, after too many of those"),
        Metric(
            "reward/code_over_{time,memory,processes,files,output}",
            "answers",
            "over this limit of reward.code: score 0",
            "steps with a response that is a program",
        ),
    ),
    "Updates": (
        Metric(
            "{actor,critic}/grad_norm",
            "1",
            "global gradient norm before clipping, mean over optimiser steps",
            "steps that update the model",
        ),
        Metric("{actor,critic}/lr", "1", "learning rate", "steps that update the model", label="{}"),
        Metric("{actor,critic}/loss", "1", "what was minimised", "steps that update the model"),
        Metric(
            "{actor,critic}/num_skipped_steps",
            "steps",
            "optimiser steps skipped for a gradient that was not finite",
            "steps that update the model",
        ),
        Metric(
            "{actor,critic}/num_empty_steps",
            "steps",
            "optimiser steps left out because no token was left to learn from",
            "steps that update the model",
        ),
        Metric("actor/num_stopped_steps", "steps", "optimiser steps left out for actor.target_kl", "actor.target_kl"),
        Metric(
            "{actor,critic}/tokens_rank_{min,max,mean}",
            "tokens",
            "tokens that one rank trained on",
            "steps that update the model",
        ),
        Metric("actor/pg_loss", "1", "policy loss", "steps that update the actor"),
        Metric(
            "actor/pg_clipfrac",
            "1",
            "vanilla: share of tokens at the clip; other losses: as docs/algorithms.md says",
            "steps that update the actor",
            label="clipped",
        ),
        Metric(
            "actor/pg_clipfrac_lower",
            "1",
            "vanilla: share of tokens at the dual clip; other losses: likewise",
            "steps that update the actor",
            label="clipped twice (dual clip)",
        ),
        Metric(
            "actor/pg_klfrac", "1", "kl_cov: share of tokens with the KL penalty", "actor.policy_loss.loss_mode: kl_cov"
        ),
        Metric(
            "actor/rollout_rs_masked_fraction",
            "1",
            "bypass_mode: share of tokens that rollout_rs rejects in the update",
            "rollout_rs in bypass_mode",
        ),
        Metric("actor/policy_loss/<metric>", "1", "of a loss of your own: mean over tokens", "a loss of your own"),
        Metric(
            "actor/ppo_kl",
            "nats",
            "KL of the policy from the one that sampled, k1 estimate",
            "steps that update the actor",
            label="old to new policy",
            terminal="ppo_kl",
        ),
        Metric("actor/entropy", "nats", "entropy per token", "steps that update the actor", label="entropy"),
        Metric("actor/entropy_coeff", "1", "weight of the entropy bonus in this step", "steps that update the actor"),
        Metric(
            "actor/kl_loss",
            "nats",
            "KL to the reference in the loss",
            "actor.use_kl_loss",
            label="to the reference (loss)",
            terminal="KL",
        ),
        Metric("actor/kl_coef", "1", "its weight in this step", "actor.use_kl_loss"),
        Metric(
            "actor/reward_kl_penalty",
            "nats",
            "KL to the reference in the reward: mean over rows of means over tokens",
            "algorithm.use_kl_in_reward",
            label="to the reference",
            terminal="KL",
        ),
        Metric("actor/reward_kl_penalty_coeff", "1", "its coefficient in this step", "algorithm.use_kl_in_reward"),
        Metric(
            "critic/vf_loss",
            "1",
            "value loss; of normalised values with critic.normalize_values",
            "steps that update the critic",
            label="value loss",
        ),
        Metric("critic/vf_clipfrac", "1", "share of tokens whose value is clipped", "steps that update the critic"),
        Metric("critic/vpred_mean", "1", "mean value during the update; likewise", "steps that update the critic"),
    ),
    "Distillation": (
        Metric(
            "distillation/kl",
            "nats",
            "KL of the policy from the teacher, k1 estimate: mean over tokens",
            "with a teacher",
            label="to the teacher",
            terminal="KL to teacher",
        ),
        Metric(
            "distillation/agreement",
            "1",
            "share of tokens that the teacher would accept: mean of min(1, q / p)",
            "with a teacher",
        ),
        Metric(
            "distillation/<source>/{kl,agreement}", "nats, 1", "the same, of one data source", "several data sources"
        ),
        Metric("distillation/coef", "1", "weight of the teacher's signal in this step", "with a teacher"),
        Metric(
            "distillation/loss",
            "nats",
            "signal loss and top_k: KL in the loss, before its weight",
            "teacher.signal: loss or top_k",
        ),
        Metric(
            "distillation/{student,teacher}_mass",
            "1",
            "signal top_k: probability of the teacher's most likely tokens",
            "teacher.signal: top_k",
        ),
    ),
    "Responses": (
        Metric("response_length/{mean,max,min}", "tokens", "length of a response", label="{}"),
        Metric("response_length/clip_ratio", "1", "share of responses as long as is allowed", label="at the limit"),
        Metric("response_length_non_aborted/{mean,max,min}", "tokens", "the same, of those with any token"),
        Metric("response_length_non_aborted/clip_ratio", "1", "the same, of those with any token"),
        Metric("prompt_length/{mean,max,min}", "tokens", "length of a prompt, over responses"),
        Metric("prompt_length/clip_ratio", "1", "share of prompts as long as is allowed"),
        Metric("response/aborted_ratio", "1", "share of responses without any token"),
        Metric(
            "response/no_eos_ratio", "1", "share of responses that do not end with an EOS token", label="without EOS"
        ),
        Metric("global_seqlen/{min,max,minmax_diff}", "tokens", "tokens per rank, were rows dealt out in order"),
        Metric("global_seqlen/{balanced_min,balanced_max,mean}", "tokens", "tokens per rank, balanced"),
    ),
    "Conversations": (
        Metric(
            "num_turns/{mean,max,min}",
            "turns",
            "of the policy, in a conversation (rollout.multi_turn)",
            "rollout.multi_turn",
        ),
        Metric(
            "tool_call_counts/{mean,max,min}",
            "calls",
            "of tools in a conversation, as they were read; wrong ones, too",
            "rollout.multi_turn",
        ),
        Metric(
            "response_length/sampled/{mean,max,min}",
            "tokens",
            "of a response, without those of tools and environments",
            "rollout.multi_turn",
        ),
        Metric(
            "num_contexts/{mean,max,min}",
            "contexts",
            "of a response, that of the prompt included",
            "rollout.multi_turn",
        ),
        Metric(
            "num_contexts/returned",
            "contexts",
            "of all responses that go back to an earlier turn",
            "rollout.multi_turn",
        ),
        Metric(
            "response_length/contexts/{mean,max,min}",
            "tokens",
            "of a response's later contexts, as far as they were not sampled",
            "rollout.multi_turn",
        ),
        Metric("environment/num_bad_calls", "calls", "of unknown tools, or with wrong arguments", "rollout.multi_turn"),
        Metric(
            "environment/num_{tool_errors,timeouts}",
            "calls",
            "that raised; that took longer than timeout_s",
            "rollout.multi_turn",
        ),
        Metric(
            "environment/num_crashes", "calls", "of those that raised: that ended their process", "rollout.multi_turn"
        ),
        Metric(
            "environment/num_overlapping",
            "requests",
            "of agents, that came before those before them were answered",
            "rollout.multi_turn",
        ),
        Metric(
            "environment/num_agent_errors",
            "conversations",
            "whose agent raised, hung or exited with an error after an answer of the policy",
            "rollout.multi_turn",
        ),
        Metric(
            "environment/num_truncated",
            "conversations",
            "that did not fit into data.max_response_length, or did not end though nothing more fitted into a context",
            "rollout.multi_turn",
        ),
        Metric(
            "environment/num_lost",
            "conversations",
            "whose environment failed: they score 0, nothing is learned of them",
            "rollout.multi_turn",
        ),
        Metric("timing_s/environment", "s", "in which at least one environment or tool was at work"),
        Metric(
            "timing_s/wait_replies",
            "s",
            "in which rank 0 of a sampling group waited for replies, and decoded nothing",
            "rollout.multi_turn",
        ),
        Metric(
            "val-aux/num_turns/{mean,max,min}",
            "turns",
            "of the policy, in a conversation of the validation",
            "rollout.multi_turn, steps with a validation",
        ),
    ),
    "Dynamic sampling": (
        Metric(
            "train/num_gen_batches",
            "1",
            "rounds of data.gen_batch_size prompts that the step took",
            "algorithm.filter_groups",
        ),
        Metric(
            "training/filter_groups/evicted_samples",
            "prompts",
            "dropped because all samples have the same metric value",
            "algorithm.filter_groups",
        ),
        Metric(
            "training/filter_groups/evicted_{right,wrong}",
            "prompts",
            "those of a value of 1 or more; of 0 or less",
            "algorithm.filter_groups",
        ),
        Metric(
            "training/filter_groups/discarded_surplus_samples",
            "prompts",
            "whose samples differ, beyond the full step",
            "algorithm.filter_groups",
        ),
        Metric(
            "training/filter_groups/share_kept",
            "1",
            "share of the answered prompts whose samples differ",
            "algorithm.filter_groups",
        ),
    ),
    "Rollout backend and trainer": (
        Metric(
            "training/staleness",
            "updates",
            "between the weights that sampled the step's responses and those that learn; of tokens, the mean",
            "rollout.staleness: 1, or rollout.max_step_tokens",
        ),
        Metric(
            "partial/max_age",
            "updates",
            "the same, of the oldest token that the step learns from",
            "rollout.max_step_tokens",
        ),
        Metric(
            "partial/age_share/<age>",
            "1",
            "share of the tokens that are so many updates old",
            "rollout.max_step_tokens",
        ),
        Metric(
            "partial/length_ratio",
            "1",
            "mean length of the responses that the step learns from / tokens that it samples per response that ends in"
            " it; under 1 while short responses come first",
            "rollout.max_step_tokens",
        ),
        Metric(
            "partial/num_pending",
            "responses",
            "that are unfinished when the step begins to learn",
            "rollout.max_step_tokens",
        ),
        Metric(
            "partial/{num_waiting,num_drawn}",
            "prompts",
            "whose responses are complete, and wait for the next step; that the step has drawn",
            "rollout.max_step_tokens",
        ),
        Metric(
            "partial/num_rounds",
            "1",
            "how often the step has sampled rollout.max_step_tokens tokens of every unfinished response",
            "rollout.max_step_tokens",
        ),
        Metric(
            "training/rollout_probs_diff_{max,mean,std}",
            "1",
            "|probability by the trainer - by the rollout backend|",
            "steps that compare the two",
            label="{}",
        ),
        Metric(
            "training/rollout_log_probs_diff_{max,mean}",
            "nats",
            "|log-prob by the trainer - by the rollout backend|",
            "steps that compare the two",
            label="{}",
        ),
        Metric(
            "training/probe_log_probs_diff_{max,mean}",
            "nats",
            "the same, of a probe of the rollout group's new weights",
            "with a rollout group",
        ),
        Metric(
            "training/rollout_actor_probs_pearson_corr",
            "1",
            "correlation of the two probabilities over tokens",
            "steps that compare the two",
        ),
        Metric(
            "rollout_corr/{kl,k3_kl}",
            "nats",
            "KL of the rollout backend from the trainer, k1 and k3 estimates",
            "steps that compare the two",
            label="{}",
        ),
        Metric(
            "rollout_corr/{training_ppl,rollout_ppl}",
            "1",
            "perplexity of a response, by trainer and rollout backend",
            "steps that compare the two",
        ),
        Metric(
            "rollout_corr/{training_log_ppl,rollout_log_ppl}",
            "nats",
            "minus the mean log-prob of a response's tokens",
            "steps that compare the two",
        ),
        Metric(
            "rollout_corr/log_ppl_{diff,abs_diff,diff_max,diff_min}",
            "nats",
            "of a response: trainer - rollout backend",
            "steps that compare the two",
        ),
        Metric(
            "rollout_corr/ppl_ratio",
            "1",
            "of a response: perplexity by the trainer / by the rollout backend",
            "steps that compare the two",
        ),
        Metric(
            "rollout_corr/{chi2_token,chi2_seq}",
            "1",
            "mean (p / q)^2 - 1; p: trainer's, q: engine's probability",
            "steps that compare the two",
        ),
        Metric(
            "rollout_corr/rollout_is_{mean,std}",
            "1",
            "importance weight of a token as it is applied",
            "algorithm.rollout_correction.rollout_is",
            label="{}",
        ),
        Metric(
            "rollout_corr/rollout_is_{max,min}",
            "1",
            "the same; sequence: before the truncation",
            "algorithm.rollout_correction.rollout_is",
        ),
        Metric(
            "rollout_corr/rollout_is_ratio_fraction_high",
            "1",
            "share of weights that were over the threshold",
            "algorithm.rollout_correction.rollout_is",
        ),
        Metric(
            "rollout_corr/rollout_is_ratio_fraction_low",
            "1",
            "share of weights under 1 / it, or under the lower bound",
            "algorithm.rollout_correction.rollout_is",
        ),
        Metric(
            "rollout_corr/rollout_is_oob_ratio",
            "1",
            "share of tokens whose weight is 0, being outside of two bounds",
            "two bounds in rollout_is_threshold",
        ),
        Metric(
            "rollout_corr/rollout_is_eff_sample_size",
            "1",
            "share of tokens that weigh as much if weighted equally",
            "algorithm.rollout_correction.rollout_is",
            label="effective sample size",
        ),
        Metric(
            "rollout_corr/rollout_is_seq_{mean,std,max,min,max_deviation}",
            "1",
            "mean weight of a response's tokens",
            "algorithm.rollout_correction.rollout_is",
        ),
        Metric(
            "rollout_corr/rollout_is_seq_fraction_{high,low}",
            "1",
            "share of responses whose mean weight was beyond",
            "algorithm.rollout_correction.rollout_is",
        ),
        Metric(
            "rollout_corr/rollout_is_batch_norm_factor",
            "1",
            "what the truncated weights are divided by",
            "algorithm.rollout_correction.rollout_is_batch_normalize",
        ),
        Metric(
            "rollout_corr/rollout_rs_masked_fraction",
            "1",
            "share of tokens that are rejected",
            "algorithm.rollout_correction.rollout_rs",
        ),
        Metric(
            "rollout_corr/rollout_rs_seq_masked_fraction",
            "1",
            "share of responses that lose a token",
            "algorithm.rollout_correction.rollout_rs",
        ),
        Metric(
            "rollout_corr/rollout_rs_<option>_{mean,max,min,std}",
            "nats",
            "one criterion's statistic over tokens",
            "algorithm.rollout_correction.rollout_rs",
        ),
        Metric(
            "rollout_corr/rollout_rs_<option>_seq_{mean,std,max,min,max_deviation}",
            "nats",
            "and over responses",
            "algorithm.rollout_correction.rollout_rs",
        ),
        Metric(
            "rollout_corr/rollout_rs_<option>_{fraction_high,fraction_low}",
            "1",
            "share of tokens beyond its bounds",
            "algorithm.rollout_correction.rollout_rs",
        ),
        Metric(
            "rollout_corr/rollout_rs_<option>_seq_fraction_{high,low}",
            "1",
            "share of responses beyond them",
            "algorithm.rollout_correction.rollout_rs",
        ),
        Metric(
            "rollout_corr/rollout_rs_<option>_{masked_fraction,seq_masked_fraction}",
            "1",
            "shares that it rejects",
            "algorithm.rollout_correction.rollout_rs",
        ),
    ),
    "Time": (
        Metric(
            "timing_s/{step,gen,reward,adv,update_actor_critic}",
            "s",
            "that the controller spent in it; parts may overlap",
            label="{}",
        ),
        Metric("timing_s/{update_actor,update_critic}", "s", "likewise", "steps that update the model", label="{}"),
        Metric(
            "timing_s/{old_log_prob,ref,teacher,values,reward_model}",
            "s",
            "likewise",
            "steps that compute it",
            label="{}",
        ),
        Metric(
            "timing_s/{testing,save_checkpoint,stall_critic}", "s", "likewise", "steps that wait for it", label="{}"
        ),
        Metric(
            "timing_s/dynamic_sampling",
            "s",
            "likewise; it holds its share of gen, reward and reward_model",
            "algorithm.filter_groups",
        ),
        Metric(
            "timing_s/gen_max", "s", "of the generation of greedy rollouts (remax)", "algorithm.adv_estimator: remax"
        ),
        Metric("timing_s/{publish,sync}", "s", "of giving the rollout group its weights", "with a rollout group"),
        Metric(
            "timing_s/wait_rollouts",
            "s",
            "rollout.staleness 1: rest of the next generation after the actor's work",
            "rollout.staleness: 1",
        ),
        Metric(
            "timing_s/update_weights",
            "s",
            "of the first gen or testing after an update: taking over its weights",
            "after an update",
        ),
        Metric("timing_per_token_ms/gen", "ms", "of all generations, per response token of the step"),
        Metric("timing_per_token_ms/adv", "ms", "per prompt and response token"),
        Metric(
            "timing_per_token_ms/{ref,teacher,values}", "ms", "per prompt and response token", "steps that compute it"
        ),
        Metric(
            "timing_per_token_ms/{update_actor,update_critic}",
            "ms",
            "per prompt and response token",
            "steps that update the model",
        ),
        Metric("perf/total_num_tokens", "tokens", "prompt and response tokens of the step"),
        Metric("perf/time_per_step", "s", "wall time of the step, without validation and checkpoints"),
        Metric("perf/throughput", "tokens/s", "tokens per second and rank"),
        Metric(
            "perf/mfu/{actor,critic}",
            "1",
            "model FLOPs of the update / (its seconds x the peak of the group's GPUs)",
            "on GPUs",
        ),
        Metric(
            "perf/mfu/actor_infer",
            "1",
            "of the log-probs; absent, too, where engine/flops.py has no numbers",
            "on GPUs",
        ),
        Metric(
            "perf/{max_memory_allocated_gb,max_memory_reserved_gb}",
            "GiB",
            "highest use of the actor's first GPU so far",
            "on GPUs",
        ),
        Metric(
            "perf/cpu_memory_used_gb",
            "GiB",
            "main memory in use on the machine of the actor's rank 0",
            "steps that update the actor",
        ),
        Metric(
            "overlap/efficiency", "1", "share of the shorter update that the longer one hid", "steps that update both"
        ),
        Metric("overlap/bubble_actor", "1", "share of step time without a call in the engine"),
        Metric("overlap/bubble_critic", "1", "the same", "with a critic"),
        Metric("overlap/bubble_reward", "1", "the same", "with a reward group"),
        Metric(
            "overlap/bubble_rollout",
            "1",
            "the same; on the critic's devices bubble_critic is that of both groups",
            "with a rollout group",
        ),
        Metric("overlap/idle_fraction", "1", "share of step time in which no call ran in any engine"),
        Metric("rpc/{bytes_sent,bytes_received}", "bytes", "columns sent to and received from the services"),
        Metric("rpc/time_fraction", "1", "share of step time in which columns were on the wire"),
        Metric("recovery/num_restarts", "1", "times that lost groups were restarted, so far in this process"),
        Metric("recovery/num_repeated_steps", "steps", "recorded steps that were done again after that"),
    ),
    "Run and validation": (
        Metric("training/{global_step,epoch}", "1", "step, and passes over the training prompts begun before it"),
        Metric(
            "training/phase",
            "1",
            "which of algorithm.phases the step belongs to, from 1; 0: to none",
            "algorithm.phases",
        ),
        Metric(
            ACCURACY,
            "1",
            "mean over all validation responses of acc, or of the reward where there is no acc",
            "steps with a validation",
            label="held-out accuracy",
            terminal="accuracy",
        ),
        Metric(
            _ACCURACY_OF_SOURCE,
            "1",
            "mean over n responses per prompt, then over prompts",
            "steps with a validation",
            label="{}/{}/mean@{}",
        ),
        Metric(
            "val-core/<source>/<variable>/{best,maj}@<n>/{mean,std}",
            "1",
            "of all n responses, bootstrapped",
            "validations with several responses per prompt",
        ),
        Metric(
            "val-aux/<source>/<variable>/{mean,std}@<n>",
            "1",
            "mean and deviation of n responses, over prompts",
            "validations with several responses per prompt, or several variables",
        ),
        Metric(
            "val-aux/<source>/<variable>/{best,worst,maj}@<n>/{mean,std}",
            "1",
            "of n responses, bootstrapped",
            "validations with several responses per prompt, or several variables",
        ),
    ),
}


@dataclass(frozen=True)
class Figure:
    """Curves of metrics over steps that share axes.

    Attributes:
        title, unit: the texts above it; the unit of its values, "" if the title says all.
        metrics: the metrics in the order of their curves; a name with `<x>` stands for all that a run has of it.
        pages: where it is drawn: "report" (report.png), and "overview", "policy" or "critic" of the viewer.
        floor, ceiling: the limits of the value axis; None: the values set them. Values beyond them are cut off.
        recorded: what the viewer draws in its place from recorded responses, if there are any; "" for nothing.
    """

    title: str
    unit: str
    metrics: Sequence[str]
    pages: Collection[str]
    floor: float | None = None
    ceiling: float | None = None
    recorded: str = ""

    def curves(self, names: Iterable[str]) -> dict[str, str]:
        """Returns the label of each curve by its metric, for a run that has the metrics `names`."""
        all_names = list(names)
        found: dict[str, str] = {}
        for metric in self.metrics:
            own = [name for name in all_names if _pattern(metric).fullmatch(name)] if "<" in metric else [metric]
            found |= {name: label_of(name) for name in own}
        return found


_EVERYWHERE = ("report", "overview")
_PARTS_OF_A_STEP = ("step", "gen", "reward", "ref", "values", "update_actor", "update_critic")

FIGURES: Sequence[Figure] = (
    Figure("Score and held-out accuracy", "mean per response", (SCORE, "critic/rewards/mean", ACCURACY), _EVERYWHERE),
    Figure("Accuracy by data source", "share of held-out prompts", (_ACCURACY_OF_SOURCE,), _EVERYWHERE, -0.03, 1.03),
    Figure("KL", "nats per token", KL, (*_EVERYWHERE, "policy")),
    Figure(
        "Explained variance of the critic",
        "of the returns",
        (MC_EXPLAINED_VARIANCE, EXPLAINED_VARIANCE),
        (*_EVERYWHERE, "critic"),
        floor=-1.06,
        ceiling=1.06,
        recorded="explained_variance",
    ),
    Figure("Value loss", "half squared error", ("critic/vf_loss",), (*_EVERYWHERE, "critic"), floor=0.0),
    Figure("Mean value and mean return", "", ("critic/values/mean", "critic/returns/mean"), ("critic",)),
    Figure(
        "Length of responses",
        "tokens",
        ("response_length/mean", "response_length/max", "response_length/min"),
        ("overview",),
        recorded="lengths",
    ),
    Figure(
        "Responses at the limit and without EOS",
        "share",
        ("response_length/clip_ratio", "response/no_eos_ratio"),
        ("overview",),
    ),
    Figure("Entropy of the policy", "nats per token", ("actor/entropy",), (*_EVERYWHERE, "policy")),
    Figure("Tokens at the clip", "share", ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"), ("overview", "policy")),
    Figure("Learning rates", "per optimizer step", ("actor/lr", "critic/lr"), ("overview",)),
    Figure(
        "A step and its parts, which may overlap",
        "seconds",
        tuple(f"timing_s/{part}" for part in _PARTS_OF_A_STEP),
        ("overview",),
    ),
    Figure(
        "|log p of the trainer − of the rollout backend|",
        "nats",
        ("training/rollout_log_probs_diff_mean", "training/rollout_log_probs_diff_max"),
        ("policy",),
    ),
    Figure(
        "|probability by the trainer − by the rollout backend|",
        "",
        ("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"),
        ("policy",),
    ),
    Figure(
        "KL of the rollout backend from the trainer", "nats", ("rollout_corr/kl", "rollout_corr/k3_kl"), ("policy",)
    ),
    Figure(
        "Importance weights of the correction",
        "",
        ("rollout_corr/rollout_is_mean", "rollout_corr/rollout_is_eff_sample_size"),
        ("policy",),
    ),
)

# What the viewer compares runs by: of each, the last value of the first metric that a run has.
COMPARED: Mapping[str, Sequence[str]] = {
    "score": (SCORE,),
    "held-out accuracy": (ACCURACY,),
    "explained variance": (MC_EXPLAINED_VARIANCE, EXPLAINED_VARIANCE),
    "KL": KL,
    "length": ("response_length/mean",),
    "seconds per step": (STEP_S,),
}
# What the x axis of the viewer's curves may show in place of steps: the sum of a metric over the steps until then.
AXES: Mapping[str, str] = {"perf/total_num_tokens": "tokens", "perf/time_per_step": "seconds"}


@lru_cache(maxsize=1_000)
def _pattern(names: str) -> re.Pattern[str]:
    """Makes of a name with `{a,b}` and `<x>` the expression of all names that it stands for, with a group for each."""
    text = re.sub(r"<\w+>", "(.*)", re.escape(names))
    return re.compile(re.sub(r"\\{(.*?)\\}", lambda found: f"({found[1].replace(',', '|')})", text), re.DOTALL)


@lru_cache(maxsize=10_000)
def row_of(name: str) -> tuple[str, Metric] | None:
    """Returns section and row of a metric in the table of all metrics; None for another name."""
    for section, rows in METRICS.items():
        for row in rows:
            if _pattern(row.names).fullmatch(name):
                return section, row
    return None


def label_of(name: str) -> str:
    """Returns what a curve of a metric is called: its label in the table, or its name.

    A {} in a label stands for what varies in the names of its row, such as mean or actor.
    """
    found = row_of(name)
    if found is None or not found[1].label:
        return name
    _, row = found
    match = _pattern(row.names).fullmatch(name)
    assert match is not None
    return row.label.format(*match.groups())


def declared(name: str) -> Metric:
    """Returns the row of a metric in the table of all metrics; ValueError if there is none."""
    found = row_of(name)
    if found is None:
        raise ValueError(f"metric {name!r} is not declared in splitppo/run_folder/metrics.py")
    return found[1]


def check_declared(names: Iterable[str]) -> None:
    """Checks that every metric name is in the table of metrics; ValueError if one is not."""
    for name in names:
        declared(name)
