"""The section `placement`: which group hosts a model that is not trained."""

from typing import Literal

from pydantic import Field

from splitppo.config.section import Section

ReferenceHost = Literal["actor", "critic", "auto"]
RewardModelHost = Literal["critic", "reward", "auto"]


class PlacementConfig(Section):
    """Where frozen models run; on the same number of ranks the numbers are the same in every group."""

    reference: ReferenceHost = Field(
        "auto",
        description="group that holds the frozen reference and computes its log-probs: actor | critic | auto: where"
        " it delays the step least by lengths, ranks, epochs and streaming (`controller plan` explains it), else the"
        " actor; a resumed run keeps its place",
    )
    reward_model: RewardModelHost = Field(
        "auto",
        description="group that holds the reward model and computes its scores: critic | reward (a group of its own,"
        " services.reward) | auto (critic)",
    )
