"""The list of all rules between sections of a configuration, in the order in which they are checked."""

from splitppo.config.rules import conversations, learning, placement, sampling, services
from splitppo.config.schema import Config

RULES = (
    learning.phases_count,
    learning.adaptive_entropy_begins_within_its_bounds,
    placement.frozen_models_have_a_group,
    placement.meshes_fit_their_groups,
    learning.loss_type_is_the_actors_loss,
    learning.a_teacher_alone_needs_no_scores,
    learning.a_privileged_prompt_has_a_reader,
    sampling.groups_have_several_samples,
    sampling.greedy_scores_compare_with_rewards,
    sampling.validation_has_prompts,
    sampling.dynamic_sampling_fits,
    sampling.staleness_is_corrected,
    sampling.partial_rollouts_fit,
    placement.groups_in_turns_do_not_sample_ahead,
    sampling.share_has_two_groups,
    sampling.overlong_buffer_fits,
    conversations.replies_come_in_time,
    conversations.programs_end_in_time,
    conversations.contexts_have_room_for_a_prompt,
    conversations.turns_have_no_forced_length,
    placement.groups_share_no_gpu,
    placement.gpus_in_turns_are_given_back,
    services.machines_of_a_group_meet,
    services.ports_are_apart,
    services.failpoints_stay_on_this_machine,
    services.plaintext_stays_on_this_machine,
)


def check_rules(config: Config) -> None:
    """Checks all rules between sections of a configuration; raises ValueError for the first rule that does not hold.

    The sentence of the ValueError names the keys.
    """
    for rule in RULES:
        rule(config)
