"""The section `algorithm.filter_groups`: dynamic sampling, and what it needs of other sections."""

from typing import TYPE_CHECKING

from pydantic import Field

from splitppo.config.section import Section

if TYPE_CHECKING:
    from splitppo.config.schema import Config

# Metrics that name a response's score, as the scorers and the reward model give it; others name a scorer's field.
SCORE_METRICS = ("score", "seq_reward", "seq_final_reward")


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): groups of samples that are all alike are replaced by others; names are verl's."""

    enable: bool = Field(
        False, description="prompts whose samples are all alike in `metric` are dropped, and further ones drawn"
    )
    metric: str = Field(
        "score",
        min_length=1,
        description="score (also seq_reward, seq_final_reward): of scorers and reward model, before any penalty; else a"
        " numeric field of the scorer's dict, e.g. acc",
    )
    max_num_gen_batches: int = Field(
        0,
        ge=0,
        description="generations of data.gen_batch_size prompts in a step; the run ends where they do not fill it; 0:"
        " it ends where a whole data epoch gave no group",
    )

    @property
    def compares_scores(self) -> bool:
        """Whether groups are compared by score, of which a reward model's is a part."""
        return self.metric in SCORE_METRICS


def check_filter_groups(config: "Config") -> None:
    """ValueError where the sections do not fit together; the sentence names the keys."""
    data, rollout, filters = config.data, config.rollout, config.algorithm.filter_groups
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
    if rollout.stream_groups not in ("auto", 1):
        raise ValueError(
            f"rollout.stream_groups ({rollout.stream_groups}) and algorithm.filter_groups.enable exclude each other: a"
            " group is kept or dropped when all of its samples are scored; set rollout.stream_groups to 1 or auto"
        )
    most = filters.max_num_gen_batches * data.draw_size
    if 0 < most < data.train_batch_size:
        raise ValueError(
            f"algorithm.filter_groups.max_num_gen_batches ({filters.max_num_gen_batches}) generations of"
            f" {data.draw_key} ({data.draw_size}) prompts can never fill data.train_batch_size"
            f" ({data.train_batch_size}); raise algorithm.filter_groups.max_num_gen_batches"
        )
