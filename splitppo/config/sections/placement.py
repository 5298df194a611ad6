"""The configuration section `placement`: the worker groups that host the frozen models (reference, reward model)."""

from typing import Annotated, Literal

from splitppo.config.section import MAY_CHANGE, Section

ReferenceHost = Literal["actor", "critic", "auto"]
RewardModelHost = Literal["critic", "reward", "auto"]


class PlacementConfig(Section):
    """The worker groups that host the frozen models: the reference model and the reward model.

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
