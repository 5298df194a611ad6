"""The configuration sections `algorithm.adaptive_entropy` and `algorithm.phases`.

An entry of phases replaces values of other sections for some steps. `Config.at_step` puts the values of a step's phase
into the sections; `RunState.config_at_step` adds the values that adaptive coefficients have reached.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import Field

from splitppo.config.section import PositiveInt, Section, expected

MAX_LABEL = 100  # characters of a phase's name


class AdaptiveEntropy(Section):
    """Adaptive entropy bonus: its weight changes in each step to keep the entropy above a target (Skywork-OR1, 2025).

    In a step that follows a step whose entropy was above the target, the weight is 0.
    """

    enable: bool = False
    """If true, the weight of the entropy bonus is adaptive, and actor.entropy_coeff is its first value."""

    target_entropy: float = Field(0.2, ge=0.0)
    """The entropy per token, in nats, that is held: below it the weight of the entropy bonus rises, above it the weight
    falls."""

    entropy_coeff_delta: float = Field(0.005, gt=0.0)
    """The amount by which the weight of the entropy bonus rises or falls in each step."""

    min_entropy_coeff: float = Field(0.0, ge=0.0)
    """The lowest weight that the entropy bonus may get."""

    max_entropy_coeff: float = Field(1.0, ge=0.0)
    """The highest weight that the entropy bonus may get."""

    def _check_keys(self) -> None:
        low = self.min_entropy_coeff
        high = self.max_entropy_coeff
        if low > high:
            raise ValueError(f"expected min_entropy_coeff ({low:g}) to be at most max_entropy_coeff ({high:g})")


Number = Annotated[float, Field(strict=True)]
Adaptive = Literal["adaptive"] | None
NonNegative = Annotated[Annotated[Number, Field(ge=0.0)] | Adaptive, expected("at least 0, or adaptive")]


# The section of each key that a phase may change.
_SECTIONS = {
    "loss_mode": "actor.policy_loss",
    **dict.fromkeys(("entropy_coeff", "use_kl_loss", "kl_loss_coef"), "actor"),
    **dict.fromkeys(("use_kl_in_reward", "kl_coef"), "algorithm"),
    "teacher_coef": "teacher",
}


class Phase(Section):
    """A span of steps in which other configuration values apply; a key that is null keeps the value of its section.

    A number fixes a coefficient. With `adaptive` the coefficient is adapted after each step, beginning with the value
    that it has reached before the phase.
    """

    from_step: PositiveInt
    """The first step of the phase."""

    to_step: PositiveInt | None = None
    """The last step of the phase. null: the last step of the run."""

    name: str = Field("", max_length=MAX_LABEL)
    """The name of the phase in logs and plans."""

    loss_mode: str | None = None
    """The value of actor.policy_loss.loss_mode in the phase."""

    entropy_coeff: Annotated[Number | Adaptive, expected("a finite number, or adaptive")] = None
    """The value of actor.entropy_coeff in the phase, or adaptive: algorithm.adaptive_entropy controls it."""

    use_kl_loss: bool | None = None
    """The value of actor.use_kl_loss in the phase."""

    kl_loss_coef: float | None = Field(None, ge=0.0)
    """The value of actor.kl_loss_coef in the phase."""

    use_kl_in_reward: bool | None = None
    """The value of algorithm.use_kl_in_reward in the phase."""

    kl_coef: NonNegative = None
    """The value of algorithm.kl_coef in the phase, or adaptive: it is controlled as with algorithm.kl_ctrl adaptive."""

    teacher_coef: NonNegative = None
    """The value of teacher.coef in the phase, or adaptive: it is controlled as with teacher.kl_ctrl adaptive."""

    def _check_keys(self) -> None:
        if self.to_step is not None and self.to_step < self.from_step:
            raise ValueError(f"expected to_step ({self.to_step}) to be at least from_step ({self.from_step})")
        if all(getattr(self, key) is None for key in _SECTIONS):
            raise ValueError(f"the phase of {self.steps} changes nothing: expected one of {', '.join(_SECTIONS)}")

    @property
    def steps(self) -> str:
        """The first and the last step of the phase as text: "steps 1 to 10", or "steps 1 to the last"."""
        return f"steps {self.from_step} to {'the last' if self.to_step is None else self.to_step}"

    @property
    def label(self) -> str:
        """The name of the phase, or if it has no name its steps as text."""
        return self.name or self.steps

    def holds_at(self, step: int) -> bool:
        """Returns True if the step lies in this phase, from `from_step` to `to_step`."""
        return self.from_step <= step and (self.to_step is None or step <= self.to_step)

    @property
    def changes(self) -> Mapping[str, Mapping[str, Any]]:
        """The configuration values that the phase overrides, by the dotted path of their section, then by key.

        A coefficient that is given also sets whether it adapts; one that is null leaves that as it is.
        """
        changes: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS.values()}
        for name, section in _SECTIONS.items():
            if (value := getattr(self, name)) not in (None, "adaptive"):
                changes[section][name.removeprefix("teacher_")] = value
        if self.entropy_coeff is not None:
            changes["algorithm.adaptive_entropy"] = {"enable": self.entropy_coeff == "adaptive"}
        if self.kl_coef is not None:
            changes["algorithm"]["kl_ctrl"] = "adaptive" if self.kl_coef == "adaptive" else "fixed"
        if self.teacher_coef is not None:
            changes["teacher"]["kl_ctrl"] = "adaptive" if self.teacher_coef == "adaptive" else "fixed"
        return changes


def check_apart(phases: Sequence[Phase]) -> None:
    """Checks that no step belongs to two phases; raises ValueError with the steps of both phases."""
    for (number, first), (later, second) in combinations(enumerate(phases), 2):
        if first.holds_at(second.from_step) or second.holds_at(first.from_step):
            raise ValueError(
                f"phases must not overlap, but phases.{number} has {first.steps} and phases.{later} {second.steps}"
            )
