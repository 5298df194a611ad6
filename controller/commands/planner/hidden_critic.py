"""Says how large a critic may be whose work costs no time under the schedule `overlap`."""

from collections.abc import Callable
from dataclasses import dataclass

from controller.models.shape import ModelShape, UnknownShape, read_model_shape
from splitppo.config import Config

CRITIC_PHASES = ("values", "update_critic")
_TOLERANCE = 0.01  # a step that is longer by this share counts as equally long
_MOST = 8.0
_HALVINGS = 8


@dataclass(frozen=True)
class HiddenCritic:
    """The largest critic whose work hides behind that of the actor, by the predicted steps of `overlap`.

    Attributes:
        factor: its size, in sizes of the critic that was measured; `is_most` if even this one, the largest that was
            tried, is hidden.
        of_policy: its size, in sizes of the policy; None if one of the models is not known.
        free_step_s: seconds of a step without any work of the critic.
        step_s: seconds of a step with the critic that was measured.
    """

    factor: float
    is_most: bool
    of_policy: float | None
    free_step_s: float
    step_s: float

    def __str__(self) -> str:
        """Returns a sentence for people."""
        size = f"{self.factor:.2g} times this one's size"
        if self.of_policy is not None:
            size = f"{self.of_policy:.2g} of the policy's size ({size})"
        reach = "of" if self.is_most else "of up to"
        return (
            f"critic.model: under overlap a critic {reach} {size} costs no time, if seconds grow with the weights of"
            f" its layers; a step takes {self.free_step_s:.3g} s without the critic's work, {self.step_s:.3g} s with"
            " this critic."
        )


def hidden_critic(config: Config, step_s: Callable[[float], float]) -> HiddenCritic:
    """Searches the largest critic that costs no time.

    `step_s` takes a size, in sizes of the critic that was measured, and returns the predicted seconds of a step under
    `overlap`. Values and update of a critic take seconds in proportion to the weights of its layers.
    """
    free_step_s = step_s(0.0)
    limit_s = free_step_s * (1.0 + _TOLERANCE)
    is_most = step_s(_MOST) <= limit_s
    hidden = _MOST if is_most else 0.0
    costly = _MOST
    for _ in range(0 if is_most else _HALVINGS):
        middle = (hidden + costly) / 2.0
        if step_s(middle) <= limit_s:
            hidden = middle
        else:
            costly = middle
    ratio = _size_of_policy(config)
    return HiddenCritic(hidden, is_most, None if ratio is None else hidden * ratio, free_step_s, step_s(1.0))


def _size_of_policy(config: Config) -> float | None:
    """Returns the weights of the critic's layers / those of the policy's; None if a model is not in a local folder."""
    try:
        critic = read_model_shape(config.critic.model, "value", "critic.model")
        policy = read_model_shape(config.actor.model, "policy", "actor.model")
    except (UnknownShape, ValueError):
        return None
    return _in_layers(critic) / _in_layers(policy)


def _in_layers(shape: ModelShape) -> int:
    return shape.num_parameters - shape.root_parameters
