"""Warns of models that compute in fp32 on GPUs."""

from splitppo.config.schema import Config
from splitppo.config.section import RoleName
from splitppo.config.sections.models import ComputedModelConfig


def fp32_on_gpus(config: Config) -> str | None:
    """Returns a warning that names the models of a resolved `config` that compute in fp32 on GPUs, or None."""
    models: list[tuple[str, RoleName | None, ComputedModelConfig]] = [
        *((role, role, config.trained_model_of(role)) for role in config.trained_roles),
        ("actor", "rollout" if "rollout" in config.sampling_roles else None, config.actor),
        ("reward_model", config.reward_model_host, config.reward_model),
        ("teacher", config.teacher_host, config.teacher),
    ]
    keys: list[str] = []
    for section, host, model in models:
        if host is not None and model.dtype == "fp32" and config.services.of(host).devices:
            keys.append(f"{section}.dtype")
    if not keys:
        return None
    named = " and ".join(dict.fromkeys(keys))
    return (
        f"{named}: fp32 on GPUs is slow: matrix products use no tensor cores, and attention pads packed"
        " rows and repeats key-value heads, because torch's kernels for both take bf16 alone; set bf16, with which the"
        " weights that the optimizer updates stay fp32"
    )
