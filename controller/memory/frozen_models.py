"""The frozen models that worker groups hold beside the models that they train, as a table: one row for each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.models.shape import Kind
from splitppo.config import Config
from splitppo.config.section import RoleName
from splitppo.config.sections.teacher import TeacherConfig


@dataclass(frozen=True)
class FrozenModel:
    """A frozen model of a run: where the configuration names it, and when it computes.

    Attributes:
        section: the section of the configuration that has the model's path, dtype and micro-batches.
        kind: "policy" if the model computes log-probs, "value" if it has a head with one label.
        phase: the phase of a step in which the model computes.
        offload_key: the key that moves the model to main memory in all other phases.
    """

    section: str
    kind: Kind
    phase: str
    offload_key: str

    def models(self, config: Config) -> Sequence[str]:
        """Returns the folders or hub names of the model: one, or those of all teachers."""
        section = getattr(config, self.section)
        return section.folders if isinstance(section, TeacherConfig) else (section.model,)


# By the name of the weights in `Terms`. The reference is what the actor starts from.
FROZEN_MODELS: Mapping[str, FrozenModel] = {
    "reference": FrozenModel("actor", "policy", "reference", "placement.reference_param_offload"),
    "reward_model": FrozenModel("reward_model", "value", "reward", "reward_model.param_offload"),
    "teacher": FrozenModel("teacher", "policy", "teacher", "teacher.param_offload"),
}


def frozen_models_of(config: Config, role: RoleName) -> dict[str, FrozenModel]:
    """Returns the rows of the frozen models that a role's worker group holds, by the name of the model."""
    return {name: model for name, model in FROZEN_MODELS.items() if getattr(config, f"{name}_host") == role}
