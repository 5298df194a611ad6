"""Declares the names of all metrics, with unit and meaning; a metric that is not declared here is an error.

`{a,b}` in a name stands for each of its words, `<x>` for any text. Names never change, because dashboards use them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

# By section: (names, unit, meaning). The unit is "1" for shares, ratios and plain numbers. The meaning is that of one
# step's value, unless it says otherwise. `python -m tools.docs` makes docs/metrics.md of this table.
METRICS: Mapping[str, Sequence[tuple[str, str, str]]] = {
    "Rewards, advantages, values": (
        ("critic/score/{mean,max,min}", "1", "score of a response, as it was given, that of its tokens included"),
        ("critic/greedy_score/mean", "1", "score of the greedy rollout of a prompt, remax's baseline; no penalties"),
        ("critic/rewards/{mean,max,min}", "1", "sum of a response's token rewards: shaped, KL penalty included"),
        ("critic/advantages/{mean,max,min}", "1", "advantage of a response token, as the loss sees it"),
        ("critic/returns/{mean,max,min}", "1", "return of a response token"),
        ("critic/values/{mean,max,min}", "1", "value of the state before a response token"),
        ("critic/value_norm/{mean,std}", "1", "of all returns so far, by which critic.normalize_values scales values"),
        ("critic/vf_explained_var", "1", "1 - var(returns - values) / var(returns)"),
        ("reward_extra/<field>/{mean,max,min}", "1", "numeric field of the scorers' dicts, over the responses"),
        ("reward_extra/<scorer>_score/{mean,max,min}", "1", "score of one of several scorers that are added up"),
        ("reward_extra/{overlong_reward,overlong}/{mean,max,min}", "1", "with reward.overlong_buffer"),
        ("reward/running_std", "1", "deviation of all scores so far, by which reward.shaping.running_scale divides"),
        ("reward/rule/{mean,max,min}", "1", "score by the scorers, where a reward model scores as well"),
        ("reward/model/{mean,max,min}", "1", "score by the reward model, before its coefficient"),
        ("reward/model_clip_ratio", "1", "share of rows as long as the reward model takes; longer ones were cut"),
        ("reward/num_{timeouts,crashes,errors}", "responses", "without a score: a scorer took too long, died, raised"),
        ("reward/num_{unavailable,unparsable}", "responses", "without a score: the judge was away, or gave no mark"),
        ("reward/symbolic_gave_up", "answers", "that sympy could not compare in time"),
        ("reward/symbolic_skipped", "answers", "that were compared by spelling alone, after too many of those"),
        ("reward/code_over_{time,memory,processes,files,output}", "answers", "over this limit of reward.code: score 0"),
    ),
    "Updates": (
        ("{actor,critic}/grad_norm", "1", "global gradient norm before clipping, mean over optimiser steps"),
        ("{actor,critic}/lr", "1", "learning rate"),
        ("{actor,critic}/loss", "1", "what was minimised"),
        ("{actor,critic}/num_skipped_steps", "steps", "optimiser steps skipped for a gradient that was not finite"),
        ("{actor,critic}/num_empty_steps", "steps", "optimiser steps left out because no token was left to learn from"),
        ("actor/num_stopped_steps", "steps", "optimiser steps left out for actor.target_kl"),
        ("{actor,critic}/tokens_rank_{min,max,mean}", "tokens", "tokens that one rank trained on"),
        ("actor/pg_loss", "1", "policy loss"),
        ("actor/pg_clipfrac", "1", "vanilla: share of tokens at the clip; other losses: as docs/algorithms.md says"),
        ("actor/pg_clipfrac_lower", "1", "vanilla: share of tokens at the dual clip; other losses: likewise"),
        ("actor/pg_klfrac", "1", "kl_cov: share of tokens with the KL penalty"),
        ("actor/rollout_rs_masked_fraction", "1", "bypass_mode: share of tokens that rollout_rs rejects in the update"),
        ("actor/policy_loss/<metric>", "1", "of a loss of your own: mean over tokens"),
        ("actor/ppo_kl", "nats", "KL of the policy from the one that sampled, k1 estimate"),
        ("actor/entropy", "nats", "entropy per token"),
        ("actor/entropy_coeff", "1", "weight of the entropy bonus in this step"),
        ("actor/{kl_loss,kl_coef}", "nats, 1", "KL to the reference in the loss, and its weight"),
        ("actor/reward_kl_penalty", "nats", "KL to the reference in the reward: mean over rows of means over tokens"),
        ("actor/reward_kl_penalty_coeff", "1", "its coefficient in this step"),
        ("critic/vf_loss", "1", "value loss; of normalised values with critic.normalize_values"),
        ("critic/vf_clipfrac", "1", "share of tokens whose value is clipped"),
        ("critic/vpred_mean", "1", "mean value during the update; likewise"),
    ),
    "Distillation": (
        ("distillation/kl", "nats", "KL of the policy from the teacher, k1 estimate: mean over tokens"),
        ("distillation/agreement", "1", "share of tokens that the teacher would accept: mean of min(1, q / p)"),
        ("distillation/<source>/{kl,agreement}", "nats, 1", "the same, of one data source"),
        ("distillation/coef", "1", "weight of the teacher's signal in this step"),
        ("distillation/loss", "nats", "signal loss and top_k: KL in the loss, before its weight"),
        ("distillation/{student,teacher}_mass", "1", "signal top_k: probability of the teacher's most likely tokens"),
    ),
    "Responses": (
        ("response_length/{mean,max,min}", "tokens", "length of a response"),
        ("response_length/clip_ratio", "1", "share of responses as long as is allowed"),
        ("response_length_non_aborted/{mean,max,min}", "tokens", "the same, of those with any token"),
        ("response_length_non_aborted/clip_ratio", "1", "the same, of those with any token"),
        ("prompt_length/{mean,max,min}", "tokens", "length of a prompt, over responses"),
        ("prompt_length/clip_ratio", "1", "share of prompts as long as is allowed"),
        ("response/aborted_ratio", "1", "share of responses without any token"),
        ("response/no_eos_ratio", "1", "share of responses that do not end with an EOS token"),
        ("global_seqlen/{min,max,minmax_diff}", "tokens", "tokens per rank, were rows dealt out in order"),
        ("global_seqlen/{balanced_min,balanced_max,mean}", "tokens", "tokens per rank, balanced"),
    ),
    "Conversations": (
        ("num_turns/{mean,max,min}", "turns", "of the policy, in a conversation (rollout.multi_turn)"),
        ("tool_call_counts/{mean,max,min}", "calls", "of tools in a conversation, as they were read; wrong ones, too"),
        ("response_length/sampled/{mean,max,min}", "tokens", "of a response, without those of tools and environments"),
        ("environment/num_bad_calls", "calls", "of unknown tools, or with wrong arguments"),
        ("environment/num_{tool_errors,timeouts}", "calls", "that raised; that took longer than timeout_s"),
        ("environment/num_crashes", "calls", "of those that raised: that ended their process"),
        ("environment/num_truncated", "conversations", "that did not fit into data.max_response_length"),
        ("environment/num_lost", "conversations", "whose environment failed: they score 0, nothing is learned of them"),
        ("timing_s/environment", "s", "in which at least one environment or tool was at work"),
        ("timing_s/wait_replies", "s", "in which rank 0 of a sampling group waited for replies, and decoded nothing"),
        ("val-aux/num_turns/{mean,max,min}", "turns", "of the policy, in a conversation of the validation"),
    ),
    "Dynamic sampling": (
        ("train/num_gen_batches", "1", "generations of data.gen_batch_size prompts that the step took"),
        ("training/filter_groups/evicted_samples", "prompts", "dropped because all samples have the same metric value"),
        ("training/filter_groups/evicted_{right,wrong}", "prompts", "those of a value of 1 or more; of 0 or less"),
        ("training/filter_groups/discarded_surplus_samples", "prompts", "whose samples differ, beyond the full step"),
        ("training/filter_groups/share_kept", "1", "share of the answered prompts whose samples differ"),
    ),
    "Rollout backend and trainer": (
        ("training/staleness", "updates", "between the weights that sampled the step's responses and those that learn"),
        ("training/rollout_probs_diff_{max,mean,std}", "1", "|probability by the trainer - by the rollout backend|"),
        ("training/rollout_log_probs_diff_{max,mean}", "nats", "|log-prob by the trainer - by the rollout backend|"),
        ("training/probe_log_probs_diff_{max,mean}", "nats", "the same, of a probe of the rollout group's new weights"),
        ("training/rollout_actor_probs_pearson_corr", "1", "correlation of the two probabilities over tokens"),
        ("rollout_corr/{kl,k3_kl}", "nats", "KL of the rollout backend from the trainer, k1 and k3 estimates"),
        ("rollout_corr/{training_ppl,rollout_ppl}", "1", "perplexity of a response, by trainer and rollout backend"),
        ("rollout_corr/{training_log_ppl,rollout_log_ppl}", "nats", "minus the mean log-prob of a response's tokens"),
        ("rollout_corr/log_ppl_{diff,abs_diff,diff_max,diff_min}", "nats", "of a response: trainer - rollout backend"),
        ("rollout_corr/ppl_ratio", "1", "of a response: perplexity by the trainer / by the rollout backend"),
        ("rollout_corr/{chi2_token,chi2_seq}", "1", "mean (p / q)^2 - 1; p: trainer's, q: engine's probability"),
        ("rollout_corr/rollout_is_{mean,std}", "1", "importance weight of a token as it is applied"),
        ("rollout_corr/rollout_is_{max,min}", "1", "the same; sequence: before the truncation"),
        ("rollout_corr/rollout_is_ratio_fraction_high", "1", "share of weights that were over the threshold"),
        ("rollout_corr/rollout_is_ratio_fraction_low", "1", "share of weights under 1 / it, or under the lower bound"),
        ("rollout_corr/rollout_is_oob_ratio", "1", "share of tokens whose weight is 0, being outside of two bounds"),
        ("rollout_corr/rollout_is_eff_sample_size", "1", "share of tokens that weigh as much if weighted equally"),
        ("rollout_corr/rollout_is_seq_{mean,std,max,min,max_deviation}", "1", "mean weight of a response's tokens"),
        ("rollout_corr/rollout_is_seq_fraction_{high,low}", "1", "share of responses whose mean weight was beyond"),
        ("rollout_corr/rollout_is_batch_norm_factor", "1", "what the truncated weights are divided by"),
        ("rollout_corr/rollout_rs_masked_fraction", "1", "share of tokens that are rejected"),
        ("rollout_corr/rollout_rs_seq_masked_fraction", "1", "share of responses that lose a token"),
        ("rollout_corr/rollout_rs_<option>_{mean,max,min,std}", "nats", "one criterion's statistic over tokens"),
        ("rollout_corr/rollout_rs_<option>_seq_{mean,std,max,min,max_deviation}", "nats", "and over responses"),
        ("rollout_corr/rollout_rs_<option>_{fraction_high,fraction_low}", "1", "share of tokens beyond its bounds"),
        ("rollout_corr/rollout_rs_<option>_seq_fraction_{high,low}", "1", "share of responses beyond them"),
        ("rollout_corr/rollout_rs_<option>_{masked_fraction,seq_masked_fraction}", "1", "shares that it rejects"),
    ),
    "Time": (
        ("timing_s/{step,gen,reward,old_log_prob,ref,teacher,values}", "s", "that the controller spent in it"),
        ("timing_s/{reward_model,adv,testing,save_checkpoint,stall_critic}", "s", "likewise"),
        ("timing_s/{update_actor,update_critic,update_actor_critic}", "s", "likewise; parts may run at the same time"),
        ("timing_s/dynamic_sampling", "s", "likewise; it holds its share of gen, reward and reward_model"),
        ("timing_s/gen_max", "s", "of the generation of greedy rollouts (remax)"),
        ("timing_s/{publish,sync}", "s", "of giving the rollout group its weights"),
        ("timing_s/wait_rollouts", "s", "rollout.staleness 1: rest of the next generation after the actor's work"),
        ("timing_s/update_weights", "s", "of the first gen or testing after an update: taking over its weights"),
        ("timing_per_token_ms/gen", "ms", "of all generations, per response token of the step"),
        ("timing_per_token_ms/{ref,teacher,values,adv}", "ms", "per prompt and response token"),
        ("timing_per_token_ms/{update_actor,update_critic}", "ms", "per prompt and response token"),
        ("perf/total_num_tokens", "tokens", "prompt and response tokens of the step"),
        ("perf/time_per_step", "s", "wall time of the step, without validation and checkpoints"),
        ("perf/throughput", "tokens/s", "tokens per second and rank"),
        ("perf/mfu/{actor,critic}", "1", "model FLOPs of the update / (its seconds x the peak of the group's GPUs)"),
        ("perf/mfu/actor_infer", "1", "of the log-probs; all absent on CPUs, and where engine/flops.py has no numbers"),
        ("perf/{max_memory_allocated_gb,max_memory_reserved_gb}", "GiB", "highest use of the actor's first GPU so far"),
        ("perf/cpu_memory_used_gb", "GiB", "main memory in use on the machine of the actor's rank 0"),
        ("overlap/efficiency", "1", "share of the shorter update that the longer one hid"),
        ("overlap/bubble_{actor,critic,reward}", "1", "share of step time without a call in the engine"),
        ("overlap/bubble_rollout", "1", "the same; on the critic's devices bubble_critic is that of both groups"),
        ("overlap/idle_fraction", "1", "share of step time in which no call ran in any engine"),
        ("rpc/{bytes_sent,bytes_received}", "bytes", "columns sent to and received from the services"),
        ("rpc/time_fraction", "1", "share of step time in which columns were on the wire"),
        ("recovery/num_restarts", "1", "times that lost groups were restarted, so far in this process"),
        ("recovery/num_repeated_steps", "steps", "recorded steps that were done again after that"),
    ),
    "Run and validation": (
        ("training/{global_step,epoch}", "1", "step, and passes over the training prompts begun before it"),
        ("training/phase", "1", "which of algorithm.phases the step belongs to, from 1; 0: to none"),
        ("val/accuracy", "1", "mean over all validation responses of acc, or of the reward where there is no acc"),
        ("val-core/<source>/<variable>/mean@<n>", "1", "mean over n responses per prompt, then over prompts"),
        ("val-core/<source>/<variable>/{best,maj}@<n>/{mean,std}", "1", "of all n responses, bootstrapped"),
        ("val-aux/<source>/<variable>/{mean,std}@<n>", "1", "mean and deviation of n responses, over prompts"),
        ("val-aux/<source>/<variable>/{best,worst,maj}@<n>/{mean,std}", "1", "of n responses, bootstrapped"),
    ),
}


def _pattern(names: str) -> re.Pattern[str]:
    """Makes of a name with `{a,b}` and `<x>` the expression of all names that it stands for."""
    text = re.sub(r"<\w+>", ".*", re.escape(names))
    return re.compile(re.sub(r"\\{(.*?)\\}", lambda found: f"(?:{found[1].replace(',', '|')})", text), re.DOTALL)


_MEANINGS = {_pattern(row[0]): (section, *row[1:]) for section, rows in METRICS.items() for row in rows}


@lru_cache(maxsize=10_000)
def meaning(name: str) -> tuple[str, str, str]:
    """Returns (section, unit, meaning) of a metric by the table of all metrics; empty texts for others."""
    return next((found for pattern, found in _MEANINGS.items() if pattern.fullmatch(name)), ("", "", ""))


def check_declared(names: Iterable[str]) -> None:
    """Checks that every metric name is declared in the table of metrics; ValueError if one is not."""
    for name in names:
        if not any(meaning(name)):
            raise ValueError(f"metric {name!r} is not declared in splitppo/run_folder/metrics.py")
