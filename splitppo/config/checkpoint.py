"""The section `checkpoint`."""

from pydantic import Field

from splitppo.config.section import PositiveInt, Section


class CheckpointConfig(Section):
    """Pair checkpoints."""

    save_freq: int = Field(-1, ge=-1, description="steps between checkpoints; -1: none before the last step")
    save_last: bool = Field(True, description="a checkpoint after the last step; Ctrl-C saves in any case")
    keep: PositiveInt = Field(3, description="newest checkpoints kept")
    save_hf_model: bool = Field(False, description="also write Hugging Face folders")
