"""Rules of groups and devices: every model has a group, and no two groups have one GPU."""

from splitppo.config.schema import Config


def reference_has_a_group(config: Config) -> None:
    """Checks that the group named by `placement.reference` is started."""
    if config.placement.reference == "critic" and not config.uses_critic:
        raise ValueError(_no_critic(config, "placement.reference", "actor"))


def reward_model_has_a_group(config: Config) -> None:
    """Checks that the group of the reward model is started."""
    if config.reward_model_host == "critic" and not config.uses_critic:
        raise ValueError(_no_critic(config, "placement.reward_model", "reward"))


def groups_share_no_gpu(config: Config) -> None:
    """Checks that groups have GPUs of their own, unless they may share them."""
    if config.services.allow_shared_devices:
        return
    for shared in config.shared_devices[:1]:
        devices = {role: list(group.devices) for role, group in config.groups.items()}
        both = " and ".join(f"services.{role}.devices {of}" for role, of in devices.items() if shared in of)
        raise ValueError(f"{both} overlap; give each group its own GPUs, or set services.allow_shared_devices")


def _no_critic(config: Config, key: str, other: str) -> str:
    return (
        f"{key} is critic, but algorithm.adv_estimator {config.algorithm.adv_estimator} needs no values and starts no"
        f" critic: set {key} to {other}, or take an estimator with a critic"
    )
