"""Rules of groups and devices: every model has a group, and no two groups have the same GPU."""

from splitppo.config.schema import Config


def frozen_models_have_a_group(config: Config) -> None:
    """Checks that the groups of the reference and of the reward model are started."""
    hosts = {"reference": config.placement.reference, "reward_model": config.reward_model_host}
    for model, other in (("reference", "actor"), ("reward_model", "reward")):
        if hosts[model] == "critic" and not config.uses_critic:
            raise ValueError(
                f"placement.{model} is critic, but algorithm.adv_estimator {config.algorithm.adv_estimator} needs no"
                f" values and starts no critic: set placement.{model} to {other}, or take an estimator with a critic"
            )


def groups_share_no_gpu(config: Config) -> None:
    """Checks that groups have GPUs of their own, unless they may share them."""
    if config.services.allow_shared_devices:
        return
    for shared in config.shared_devices[:1]:
        devices = {role: list(group.devices) for role, group in config.groups.items()}
        both = " and ".join(f"services.{role}.devices {of}" for role, of in devices.items() if shared in of)
        raise ValueError(f"{both} overlap; give each group its own GPUs, or set services.allow_shared_devices")
