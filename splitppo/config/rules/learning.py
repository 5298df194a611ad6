"""Rules between keys about the loss: phases, the entropy bonus, rollout correction."""

from pydantic import ValidationError

from splitppo.config.schema import Config


def phases_count(config: Config) -> None:
    """Checks that `actor` and `algorithm` are valid in each phase, and no phase sets the weight of an unused KL."""
    for number, phase in enumerate(config.algorithm.phases):
        key = f"algorithm.phases.{number}"
        in_phase = config.in_phase(phase)
        try:
            for section in (in_phase.actor, in_phase.algorithm, in_phase.teacher):
                type(section)(**section.model_dump())
        except ValidationError as error:
            raise ValueError(f"{key}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
        for coef, switch, is_on in (
            ("kl_coef", "use_kl_in_reward", in_phase.algorithm.use_kl_in_reward),
            ("kl_loss_coef", "use_kl_loss", in_phase.actor.use_kl_loss),
            ("teacher_coef", "teacher.model", bool(config.teacher.folders)),
        ):
            if getattr(phase, coef) is not None and not is_on:
                raise ValueError(f"{key}: {coef} is of no use without {switch}: set {switch}, or drop {coef}")


def adaptive_entropy_begins_within_its_bounds(config: Config) -> None:
    """Checks that `actor.entropy_coeff` lies within the bounds of `algorithm.adaptive_entropy`, if that is used."""
    adaptive = config.algorithm.adaptive_entropy
    coeff = config.actor.entropy_coeff
    low = adaptive.min_entropy_coeff
    high = adaptive.max_entropy_coeff
    is_used = any(phase.algorithm.adaptive_entropy.enable for phase in config.in_every_phase)
    if is_used and not low <= coeff <= high:
        raise ValueError(
            f"actor.entropy_coeff ({coeff:g}) must lie between algorithm.adaptive_entropy.min_entropy_coeff"
            f" ({low:g}) and max_entropy_coeff ({high:g})"
        )


def loss_type_is_the_actors_loss(config: Config) -> None:
    """Checks that `actor.policy_loss` and phases have the loss and rejections of `algorithm.rollout_correction`."""
    correction = config.algorithm.rollout_correction
    policy_loss = config.actor.policy_loss
    is_reinforce = correction.loss_type == "reinforce"
    if is_reinforce and (policy_loss.loss_mode, policy_loss.reinforce_is) != ("reinforce", correction.rollout_is):
        raise ValueError(
            "algorithm.rollout_correction.loss_type is reinforce, which sets actor.policy_loss.loss_mode and"
            f" reinforce_is: leave both out, got {policy_loss.loss_mode!r} and {policy_loss.reinforce_is!r}"
        )
    if policy_loss.rejections != (correction.rejections if correction.bypasses else ()):
        raise ValueError(
            "rollout_rs is a key of algorithm.rollout_correction, which with bypass_mode sets that of"
            f" actor.policy_loss: leave rollout_rs out of actor.policy_loss, got {policy_loss.rollout_rs!r}"
        )
    for number, phase in enumerate(config.algorithm.phases):
        if is_reinforce and phase.loss_mode not in (None, "reinforce"):
            raise ValueError(
                f"algorithm.phases.{number}: loss_mode is {phase.loss_mode!r}, but"
                " algorithm.rollout_correction.loss_type is reinforce, whose weights no other loss has: leave"
                " loss_type out, and set bypass_mode and actor.policy_loss"
            )


def a_teacher_alone_needs_no_scores(config: Config) -> None:
    """Checks that a run with `teacher.only` asks for nothing that only scores of responses could give."""
    teacher = config.teacher
    algorithm = config.algorithm
    if not teacher.only:
        return
    # With rewards of 0, these estimators would make advantages that are not 0, or have a critic learn nothing.
    learns_from_rewards = teacher.signal == "reward"
    if {"components_KB", "greedy_scores_B"} & {*algorithm.needs} or (config.uses_critic and not learns_from_rewards):
        others = "reinforce_plus_plus" if learns_from_rewards else "reinforce_plus_plus, or teacher.signal to reward"
        raise ValueError(
            f"teacher.only has no scores, which algorithm.adv_estimator {algorithm.adv_estimator} needs: set"
            f" algorithm.adv_estimator to {others}"
        )
    if algorithm.filter_groups.enable:
        raise ValueError("teacher.only has no scores, by which algorithm.filter_groups compares: set enable to false")
    if config.reward.overlong_buffer.enable:
        raise ValueError("teacher.only has no scores, from which reward.overlong_buffer subtracts: set enable to false")
    if config.reward_model.model:
        raise ValueError("teacher.only has no scores: leave reward_model.model out, or set teacher.only to false")


def a_privileged_prompt_has_a_reader(config: Config) -> None:
    """Checks that a run with `critic.privileged_prompt` has a critic, since nothing else may read that text."""
    if config.critic.privileged_prompt is not None and not config.uses_critic:
        raise ValueError(
            "critic.privileged_prompt is for the critic alone, and algorithm.adv_estimator"
            f" {config.algorithm.adv_estimator} has none: leave it out, or set algorithm.adv_estimator to gae"
        )
