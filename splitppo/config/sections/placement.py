"""The section `placement`: which group hosts a model that is not trained."""

from typing import Literal

from splitppo.config.section import Section

ReferenceHost = Literal["actor", "critic", "auto"]
RewardModelHost = Literal["critic", "reward", "auto"]


class PlacementConfig(Section):
    """Where frozen models run; on the same number of ranks the numbers are the same in every group."""

    reference: ReferenceHost = "auto"
    """group that holds the frozen reference and computes its log-probs: actor | critic | auto: the critic where it has
    time, since responses are streamed or it has more ranks, and its update takes no longer than the actor's, else
    the actor; a resumed run keeps its place"""

    reward_model: RewardModelHost = "auto"
    """group that holds the reward model and computes its scores: critic | reward (a group of its own, services.reward)
    | auto (critic)"""
