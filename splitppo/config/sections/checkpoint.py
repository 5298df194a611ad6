"""The configuration section `checkpoint`: when checkpoints are written, and how many are kept."""

from pydantic import Field

from splitppo.config.section import PositiveInt, Section
from splitppo.config.sections.evaluation import MetricMode, ValidationMetric


class CheckpointConfig(Section):
    """The settings of checkpoints: when actor and critic are written, always together, and how many are kept."""

    save_freq: int = Field(-1, ge=-1)
    """The number of steps from one checkpoint to the next. -1: no checkpoint before the last step."""

    save_last: bool = True
    """If true, a checkpoint is written after the last step. Ctrl-C writes one in any case."""

    keep: PositiveInt | None = 3
    """The number of newest checkpoints that are kept. null: all of them."""

    best_metric: ValidationMetric | None = None
    """The metric of validation, e.g. val/accuracy, that chooses a best checkpoint. A step whose validation is better
    than all before is saved and kept beside the newest checkpoints, until a better step is saved. checkpoints/best is a
    link to it. null: no best checkpoint."""

    best_mode: MetricMode = "max"
    """The direction of better values of best_metric. max: larger values. min: smaller values."""

    save_hf_model: bool = False
    """If true, each checkpoint also holds the weights as a Hugging Face folder."""

    weights_save_freq: int = Field(0, ge=0)
    """The number of steps from one copy of the policy's weights to the next, each a Hugging Face folder
    huggingface/global_step_N in the run folder, in the dtype of actor.dtype. These folders are never removed, and no
    run is resumed from them. 0: none."""

    max_writers: int | None = Field(None, ge=1, le=256)
    """The number of ranks on a machine, of all groups, that write files of checkpoints or of weights_save_freq at the
    same time, for slow storage. It does not hold for the weights in rollout.sync_dir, which all ranks write together.
    null: no limit."""

    def saves_weights(self, step: int) -> bool:
        """Returns True if the policy's weights are kept as a Hugging Face folder after the update of `step`."""
        return step > 0 and self.weights_save_freq > 0 and step % self.weights_save_freq == 0
