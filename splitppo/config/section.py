"""What every section of the configuration is, and the types of values that several of them have."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

# A role has a worker group; those that are trained have checkpoints.
TrainedRoleName = Literal["actor", "critic"]
RoleName = Literal[TrainedRoleName, "reward"]

PositiveInt = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A part of the configuration: immutable, closed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _number_or_auto(value: Any) -> Any:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError("expected auto, or a number of at least 1")
    return value


NumberOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto)]


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


# Lets a single entry stand for a list of one.
OneOrMany = BeforeValidator(_as_list)
