"""The configuration section `algorithm.filter_groups`: dynamic sampling."""

from pydantic import Field

from splitppo.config.section import Section

# Names of a response's score, as scorers and reward model give it; any other metric is the name of a scorer's field.
SCORE_METRICS = ("score", "seq_reward", "seq_final_reward")


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): prompts whose responses all have the same value of `metric` are replaced.

    The names of the keys are verl's.
    """

    enable: bool = False
    """If true, prompts whose samples are all alike in `metric` are dropped, and further prompts are drawn until the
    step is full."""

    metric: str = Field("score", min_length=1)
    """The number in which the samples of a prompt are compared. score (also seq_reward, seq_final_reward): the score of
    scorers and reward model, before any penalty. acc: the scorer's field acc, or its score if there is none. Any other
    name: a numeric field that the scorer returns; a scorer without it ends the run."""

    max_num_gen_batches: int = Field(0, ge=0)
    """The largest number of rounds of data.gen_batch_size prompts in a step. The run ends if they do not fill the
    step. 0: no such limit; the run ends if a whole data epoch gave no prompt that is kept."""

    @property
    def compares_scores(self) -> bool:
        """True if dynamic sampling compares responses by their score, which includes the reward model's score."""
        return self.metric in SCORE_METRICS
