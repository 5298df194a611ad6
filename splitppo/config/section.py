"""What every section of the configuration is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration: immutable, closed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
