"""The section `algorithm.filter_groups`: dynamic sampling."""

from pydantic import Field

from splitppo.config.section import Section

# Metrics that name a response's score, as the scorers and the reward model give it; others name a scorer's field.
SCORE_METRICS = ("score", "seq_reward", "seq_final_reward")


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): groups of samples that are all alike are replaced by others; names are verl's."""

    enable: bool = False
    """prompts whose samples are all alike in `metric` are dropped, and further ones drawn"""

    metric: str = Field("score", min_length=1)
    """score (also seq_reward, seq_final_reward): of scorers and reward model, before any penalty; else a numeric field
    of the scorer's dict, e.g. acc"""

    max_num_gen_batches: int = Field(0, ge=0)
    """generations of data.gen_batch_size prompts in a step; the run ends where they do not fill it; 0: it ends where a
    whole data epoch gave no group"""

    @property
    def compares_scores(self) -> bool:
        """True if groups are compared by score, of which a reward model's is a part."""
        return self.metric in SCORE_METRICS
