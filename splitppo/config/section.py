"""The base class of all configuration sections, the marks of keys (`Key`), and types of values for several sections."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator, model_validator

# A role has a worker group; a trained role has checkpoints.
TrainedRoleName = Literal["actor", "critic"]
RoleName = Literal[TrainedRoleName, "reward", "rollout"]
ROLES: tuple[RoleName, ...] = get_args(RoleName)

# verl's names of KL estimators, and short names. A "+" changes only the gradient, and a KL in the reward has none.
KlEstimator = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]

PositiveInt = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True)
class Key:
    """The marks of one configuration key: facts about the key, stored as metadata of its pydantic field.

    A mark that is None is inherited from the section of the key.

    Attributes:
        may_change: a resumed run may have another value of the key.
        shapes_worker: the computation or the learning of a worker depends on the key, so it is part of `worker_digest`.
        is_work: the key decides what a step computes, on every machine; the planner takes measured times only from runs
            with equal values of these keys.
    """

    may_change: bool | None = None
    shapes_worker: bool | None = None
    is_work: bool | None = None


MAY_CHANGE = Key(may_change=True)
FIXED = Key(may_change=False)
SHAPES_WORKER = Key(shapes_worker=True)
CONTROLLER_ONLY = Key(shapes_worker=False)
IS_WORK = Key(is_work=True)


class Section(BaseModel):
    """The base class of all configuration sections: a frozen pydantic model that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_switch_is_a_number(cls, section: Any) -> Any:
        for name, value in section.items() if isinstance(section, dict) else ():
            field = cls.model_fields.get(name)
            if field is not None and isinstance(value, bool) and _kinds(field.annotation) <= _NUMBERS:
                raise ValueError(f"{name}: expected a number, got {value}")
        return section

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        for name, value in self:
            texts = value if isinstance(value, tuple) else (value,)
            if any(isinstance(text, str | Path) and "\0" in str(text) for text in texts):
                raise ValueError(f"{name}: expected text without NUL characters")
        self._check_keys()
        return self

    def _check_keys(self) -> None:
        """Checks what must hold between the values of the keys of this section; raises ValueError if it does not hold.

        If the sentence of the ValueError begins with the name of a key and a colon, the mistake is reported for that
        key.
        """

    def changed(self, path: str, values: Mapping[str, Any]) -> Self:
        """Returns a copy of this section with new values of keys of the inner section at `path` ("": of this section).

        The new values are not checked. They do not count as given by the user.
        """
        name, _, rest = path.partition(".")
        copy = self.model_copy(update={name: getattr(self, name).changed(rest, values)} if path else values)
        copy.model_fields_set.intersection_update(self.model_fields_set)
        return copy


_NUMBERS = {int, float, NoneType}


def _kinds(annotation: Any) -> set[Any]:
    """Returns the types of an annotation, one by one."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {kind for part in get_args(annotation) for kind in _kinds(part)}
    return {annotation}


def expected(description: str, fits: Callable[[Any], bool] = lambda _: True) -> WrapValidator:
    """Returns a pydantic validator with one sentence for all wrong values: "expected DESCRIPTION".

    Wrong are values that do not have the type that the validator annotates, and values that `fits` refuses.
    """

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        with suppress(ValidationError):
            if fits(checked := validate(value)):
                return checked
        raise ValueError(f"expected {description}")

    return WrapValidator(check)


Auto = Literal["auto"]
Count = Annotated[int, Field(ge=0, strict=True)]
NumberOrAuto = Annotated[Annotated[Count, Field(ge=1)] | Auto, expected("auto, or a number of at least 1")]
CountOrAuto = Annotated[Count | Auto, expected("auto, or a number of at least 0")]
ShareOrAuto = Annotated[Annotated[Share, Field(strict=True)] | Auto, expected("auto, or a number from 0 to 1")]
SwitchOrAuto = Annotated[Annotated[bool, Field(strict=True)] | Auto, expected("auto, true or false")]
Range = Annotated[tuple[float, float], expected("a number, then a higher one", lambda ends: ends[0] < ends[1])]


ScoredTurns = Literal["all", "last_turn"]  # of a conversation

# Lets a single entry stand for a list of one.
OneOrMany = BeforeValidator(lambda value: value if isinstance(value, list | tuple) else [value])
