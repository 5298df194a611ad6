"""The configuration section `placement`: the groups that host frozen models (reference, reward model, teachers)."""

from typing import Annotated, Literal

from splitppo.config.section import MAY_CHANGE, Section

ReferenceHost = Literal["actor", "critic", "auto"]
RewardModelHost = Literal["critic", "reward", "auto"]
TeacherHost = Literal["actor", "critic", "reward", "auto"]


class PlacementConfig(Section):
    """The worker groups that host the frozen models: the reference model, the reward model and the teachers.

    A frozen model computes the same numbers in every worker group with the same number of ranks.
    """

    reference: ReferenceHost = "auto"
    """The group that holds the frozen reference model and computes its log-probs: actor or critic. With
    actor.lora_rank the actor's group needs no second model, and auto is the actor. Else auto is the critic, if there is
    one, if it has time (responses are streamed, or it has more ranks than the actor; and no rollout group
    samples on its devices), and if its update takes no longer than the actor's; else the actor. A resumed run keeps its
    place."""

    reference_param_offload: Annotated[bool, MAY_CHANGE] = False
    """If true, the weights of the reference lie in main memory while it does not compute, and come back for its next
    command."""

    reward_model: RewardModelHost = "auto"
    """The group that holds the reward model and computes its scores. critic: the group of the critic. reward: a group
    of its own, at services.reward. auto: critic."""

    teacher: TeacherHost = "auto"
    """The group that holds the teachers and computes their log-probs: actor, critic, or reward, the group of its own at
    services.reward. auto: critic, if there is one; else reward, if placement.reward_model is reward or services.reward
    is given; else actor. A resumed run keeps its place."""
