"""The section `reward`."""

from pathlib import Path

from pydantic import Field

from splitppo.config.section import PositiveInt, Section


class RewardConfig(Section):
    """Rule-based scoring of responses, in worker processes."""

    custom_function_path: Path | None = Field(None, description="Python file with a user's scoring function")
    custom_function_name: str = Field("compute_score", description="its name in that file")
    num_workers: PositiveInt = Field(1, description="scoring processes")
    timeout_s: float = Field(30.0, gt=0.0, description="seconds per call; a call that takes longer scores 0, counted")
    num_examine: int = Field(0, ge=0, description="training samples printed per data source and step")
