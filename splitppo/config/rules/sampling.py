"""Rules between keys about prompts, responses and scores: what estimators, dynamic sampling and validation need."""

from splitppo.config.schema import Config


def groups_have_several_samples(config: Config) -> None:
    """Checks that `rollout.n` is at least 2 if the estimator of advantages compares the responses to one prompt.

    With one response, those of grpo and rloo are its score, as in verl.
    """
    has_meaning = config.algorithm.adv_estimator in ("grpo", "rloo")
    if "groups_B" in config.algorithm.needs and config.rollout.n < 2 and not has_meaning:
        raise ValueError(
            f"algorithm.adv_estimator {config.algorithm.adv_estimator} compares the samples of a prompt: expected"
            f" rollout.n of at least 2, got {config.rollout.n}"
        )


def greedy_scores_compare_with_rewards(config: Config) -> None:
    """Checks that rewards are not whitened if the estimator subtracts the score of a greedy response from them."""
    if config.algorithm.needs_greedy_scores and config.reward.shaping.whiten_rewards:
        raise ValueError(
            f"algorithm.adv_estimator {config.algorithm.adv_estimator} subtracts the score of a greedy response from"
            " rewards, which reward.shaping.whiten_rewards would put on another scale: set it to false"
        )


def validation_has_prompts(config: Config) -> None:
    """Checks that `data.val_files` is set if another key needs a validation."""
    needs = {
        "evaluation.val_only": config.evaluation.val_only,
        "evaluation.early_stop.metric": config.evaluation.early_stop.metric,
        "checkpoint.best_metric": config.checkpoint.best_metric,
    }
    for key in [key for key, is_set in needs.items() if is_set and not config.data.val_files]:
        raise ValueError(f"{key} needs validation: expected data.val_files, got none")


def dynamic_sampling_fits(config: Config) -> None:
    """Checks that `algorithm.filter_groups` fits `rollout.n`, `rollout.stream_groups` and the numbers of prompts."""
    data = config.data
    rollout = config.rollout
    filters = config.algorithm.filter_groups
    if not filters.enable:
        if data.gen_batch_size not in (None, data.train_batch_size):
            raise ValueError(
                f"data.gen_batch_size ({data.gen_batch_size}) must be data.train_batch_size ({data.train_batch_size})"
                " unless algorithm.filter_groups.enable is true: a step trains on all prompts that are drawn for it"
            )
        return
    if rollout.n == 1:
        raise ValueError(
            "algorithm.filter_groups.enable drops prompts whose samples are all alike, and a single one always is:"
            " expected rollout.n of at least 2, got 1"
        )
    if rollout.stream_groups != 1:
        raise ValueError(
            f"rollout.stream_groups ({rollout.stream_groups}) and algorithm.filter_groups.enable exclude each other: a"
            " group is kept or dropped when all of its samples are scored; set rollout.stream_groups to 1 or auto"
        )
    most = filters.max_num_gen_batches * data.draw_size
    if 0 < most < data.train_batch_size:
        raise ValueError(
            f"algorithm.filter_groups.max_num_gen_batches ({filters.max_num_gen_batches}) rounds of"
            f" {data.draw_key} ({data.draw_size}) prompts can never fill data.train_batch_size"
            f" ({data.train_batch_size}); raise algorithm.filter_groups.max_num_gen_batches"
        )


def staleness_is_corrected(config: Config) -> None:
    """Checks that `rollout.staleness` 1 has rollout correction, and no key that needs responses of current weights."""
    rollout = config.rollout
    correction = config.algorithm.rollout_correction
    if not rollout.staleness:
        return
    if not correction.bypasses and correction.rollout_is is None:
        raise ValueError(
            "rollout.staleness 1 learns from responses of older weights: expected"
            " algorithm.rollout_correction.rollout_is (token or sequence), or bypass_mode true; rollout_rs alone"
            " rejects and corrects nothing"
        )
    if rollout.check_freq:
        raise ValueError(
            f"rollout.check_freq ({rollout.check_freq}) compares log-probs under the same weights, which"
            " rollout.staleness 1 does not have: set it to 0"
        )
    if rollout.stream_groups != 1:
        raise ValueError(
            f"rollout.stream_groups ({rollout.stream_groups}) and rollout.staleness 1 exclude each other: the responses"
            " of a step are all there when it begins; set rollout.stream_groups to 1 or auto"
        )


def partial_rollouts_fit(config: Config) -> None:
    """Checks that `rollout.max_step_tokens` has rollout correction by token, and no key that needs whole responses."""
    rollout = config.rollout
    correction = config.algorithm.rollout_correction
    if rollout.max_step_tokens is None:
        if rollout.overcommit != type(rollout).model_fields["overcommit"].default:
            raise ValueError(
                f"rollout.overcommit ({rollout.overcommit:g}) is of no use without rollout.max_step_tokens, which"
                " leaves responses unfinished: set max_step_tokens, or drop overcommit"
            )
        return
    key = f"rollout.max_step_tokens ({rollout.max_step_tokens})"
    if correction.rollout_is == "sequence":
        raise ValueError(
            f"{key} has one response sampled by several versions of the policy, in which a weight of the whole response"
            " has no meaning: expected algorithm.rollout_correction.rollout_is token, got sequence"
        )
    if not correction.bypasses and correction.rollout_is is None:
        raise ValueError(
            f"{key} learns from tokens of older weights: expected algorithm.rollout_correction.rollout_is token, or"
            " bypass_mode true; rollout_rs alone rejects and corrects nothing"
        )
    if rollout.check_freq:
        raise ValueError(
            f"rollout.check_freq ({rollout.check_freq}) compares log-probs under the same weights, and {key} learns"
            " from tokens of older ones: set check_freq to 0"
        )
    estimator = f"algorithm.adv_estimator {config.algorithm.adv_estimator}"
    for other, is_set, why in (
        (
            f"rollout.stream_groups ({rollout.stream_groups})",
            rollout.stream_groups != 1,
            "which responses a step learns from is known when its sampling ends; set stream_groups to 1 or auto",
        ),
        ("rollout.staleness 1", rollout.staleness > 0, "both say which weights sample; set staleness to 0"),
        (
            f"rollout.share ({rollout.share})",
            rollout.share not in (0, 1),
            "one group goes on with all unfinished responses; set share to 0 or 1",
        ),
        (
            "rollout.multi_turn.environments",
            bool(rollout.multi_turn.environments),
            "a conversation is sampled without a break; remove one of the two",
        ),
        (
            "algorithm.filter_groups.enable",
            config.algorithm.filter_groups.enable,
            "a step that drops prompts may need more of them than are complete; set enable to false",
        ),
        (
            estimator,
            config.algorithm.needs_greedy_scores,
            "its baseline is a whole response of the step's weights; take another estimator",
        ),
    ):
        if is_set:
            raise ValueError(f"{key} and {other} exclude each other: {why}")


def share_has_two_groups(config: Config) -> None:
    """Checks that a `rollout.share` between 0 and 1 has a rollout group, and an actor's group with time to sample."""
    share = config.rollout.share
    if share in (0, 1):
        return
    if config.services.rollout is None:
        raise ValueError(
            f"rollout.share ({share}) is the share of a rollout group: expected services.rollout, e.g. with the devices"
            " or cpus of services.critic"
        )
    if config.rollout.staleness:
        raise ValueError(
            f"rollout.share ({share}) and rollout.staleness 1 exclude each other: the actor's group learns while the"
            " responses of the next step are sampled; set rollout.share to 1 or 0"
        )


def overlong_buffer_fits(config: Config) -> None:
    """Checks that the span of the penalty for long responses is not longer than `data.max_response_length`."""
    buffer = config.reward.overlong_buffer
    limit = config.data.max_response_length
    if buffer.enable and buffer.len is not None and buffer.len > limit:
        raise ValueError(
            f"reward.overlong_buffer.len ({buffer.len}) must not exceed data.max_response_length ({limit})"
        )
