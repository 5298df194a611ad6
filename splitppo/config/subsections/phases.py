"""`algorithm.phases`, values for some steps of a run in place of the sections' own; control of the entropy.

`Config.at_step` puts the phase of a step into the sections, `RunState.config_at_step` what the controllers of the
coefficients have come to.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from splitppo.config.section import PositiveInt, Section, expected, is_number

MAX_LABEL = 100  # characters of a phase's name


class AdaptiveEntropy(Section):
    """The weight of the entropy bonus is moved so that the entropy does not fall below a target (Skywork-OR1, 2025).

    In a step that follows one whose entropy was above the target, the weight is 0.
    """

    enable: bool = False
    """do so; actor.entropy_coeff is the weight to begin with"""

    target_entropy: float = Field(0.2, ge=0.0)
    """entropy per token to hold, nats"""

    entropy_coeff_delta: float = Field(0.005, gt=0.0)
    """how far the weight moves in a step, up or down"""

    min_entropy_coeff: float = Field(0.0, ge=0.0)
    """lowest weight"""

    max_entropy_coeff: float = Field(1.0, ge=0.0)
    """highest weight"""

    def _check_keys(self) -> None:
        low, high = self.min_entropy_coeff, self.max_entropy_coeff
        if low > high:
            raise ValueError(f"expected min_entropy_coeff ({low:g}) to be at most max_entropy_coeff ({high:g})")


def _is_coefficient(value: object) -> bool:
    return value is None or value == "adaptive" or (is_number(value) and math.isfinite(value))


Coefficient = Annotated[
    float | Literal["adaptive"] | None, BeforeValidator(expected("a finite number, or adaptive", _is_coefficient))
]


class Phase(Section):
    """Steps in which other values hold; what is null stays as the section has it.

    A number fixes a coefficient, and its controller rests; with `adaptive` the controller has it, from where it was.
    """

    from_step: PositiveInt
    """first step"""

    to_step: PositiveInt | None = None
    """last step; null: the last of the run"""

    name: str = Field("", max_length=MAX_LABEL)
    """for logs and plans"""

    loss_mode: str | None = None
    """as in actor.policy_loss"""

    entropy_coeff: Coefficient = None
    """as in actor, or adaptive: by algorithm.adaptive_entropy"""

    use_kl_loss: bool | None = None
    """as in actor"""

    kl_loss_coef: float | None = Field(None, ge=0.0)
    """as in actor"""

    use_kl_in_reward: bool | None = None
    """as in algorithm"""

    kl_coef: Annotated[
        Coefficient, AfterValidator(expected("at least 0", lambda value: not is_number(value) or value >= 0))
    ] = None
    """as in algorithm, or adaptive: by algorithm.kl_{target,horizon}"""

    def _check_keys(self) -> None:
        if self.to_step is not None and self.to_step < self.from_step:
            raise ValueError(f"expected to_step ({self.to_step}) to be at least from_step ({self.from_step})")
        keys = [name for name in type(self).model_fields if name not in ("from_step", "to_step", "name")]
        if all(getattr(self, key) is None for key in keys):
            raise ValueError(f"the phase of {self.steps} changes nothing: expected one of {', '.join(keys)}")

    @property
    def steps(self) -> str:
        """The steps of the phase, in words."""
        return f"steps {self.from_step} to {'the last' if self.to_step is None else self.to_step}"

    @property
    def label(self) -> str:
        """The name of the phase, or its steps."""
        return self.name or self.steps

    def holds_at(self, step: int) -> bool:
        """Returns True if a step belongs to the phase."""
        return self.from_step <= step and (self.to_step is None or step <= self.to_step)

    @property
    def changes(self) -> Mapping[str, Mapping[str, Any]]:
        """The values that the phase changes, by the path of their section."""
        given = {name: value for name, value in self.model_dump(exclude_none=True).items() if value != "adaptive"}
        actor, algorithm = ("entropy_coeff", "use_kl_loss", "kl_loss_coef"), ("use_kl_in_reward", "kl_coef")
        changes = {
            "actor": {name: given[name] for name in actor if name in given},
            "actor.policy_loss": {name: given[name] for name in ("loss_mode",) if name in given},
            "algorithm": {name: given[name] for name in algorithm if name in given},
        }
        if self.entropy_coeff is not None:
            changes["algorithm.adaptive_entropy"] = {"enable": self.entropy_coeff == "adaptive"}
        if self.kl_coef is not None:
            changes["algorithm"]["kl_ctrl"] = "adaptive" if self.kl_coef == "adaptive" else "fixed"
        return changes


def check_apart(phases: Sequence[Phase]) -> None:
    """Checks that no step belongs to two phases; ValueError names both."""
    for (number, first), (later, second) in combinations(enumerate(phases), 2):
        if first.holds_at(second.from_step) or second.holds_at(first.from_step):
            raise ValueError(
                f"phases must not overlap, but phases.{number} has {first.steps} and phases.{later} {second.steps}"
            )
