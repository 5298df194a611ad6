"""Rules between keys about worker groups and GPUs: every model has a group, and no two groups share a GPU."""

from splitppo.config.schema import Config


def frozen_models_have_a_group(config: Config) -> None:
    """Checks that no frozen model is placed in the critic's group if the run has no critic."""
    hosts = {
        "reference": config.placement.reference,
        "reward_model": config.reward_model_host,
        "teacher": config.teacher_host,
    }
    other_groups = {"reference": "actor", "reward_model": "reward", "teacher": "actor or reward"}
    for model, other_group in other_groups.items():
        if hosts[model] == "critic" and not config.uses_critic:
            raise ValueError(
                f"placement.{model} is critic, but algorithm.adv_estimator {config.algorithm.adv_estimator} needs no"
                f" values and starts no critic: set placement.{model} to {other_group}, or take an estimator with a"
                " critic"
            )


def meshes_fit_their_groups(config: Config) -> None:
    """Checks that `fsdp_size` of each trained model divides the ranks of its group, and is -1 with strategy ddp.

    `ulysses_sequence_parallel_size` must divide the ranks that hold a copy of the weights together, or all with ddp.
    """
    for role in config.trained_roles:
        model = config.trained_model_of(role)
        num_ranks = config.services.of(role).num_processes
        fsdp_size = model.fsdp_size
        if model.strategy == "ddp" and fsdp_size != -1:
            raise ValueError(
                f"{role}.fsdp_size ({fsdp_size}) divides weights, and {role}.strategy ddp holds all of them on every"
                f" rank: leave {role}.fsdp_size out, or set {role}.strategy to fsdp2"
            )
        if fsdp_size == 0 or num_ranks % fsdp_size:
            divisors = ", ".join(str(number) for number in range(1, num_ranks + 1) if num_ranks % number == 0)
            raise ValueError(
                f"{role}.fsdp_size ({fsdp_size}) must divide services.{role}.num_processes ({num_ranks}): expected one"
                f" of {divisors}, or -1 for all ranks"
            )
        sequence = model.ulysses_sequence_parallel_size
        all_divide = fsdp_size == -1  # all ranks divide the weights, or with ddp each has all of them
        divisible_by_sequence = num_ranks if all_divide else fsdp_size
        key = f"services.{role}.num_processes" if all_divide else f"{role}.fsdp_size"
        if divisible_by_sequence % sequence:
            raise ValueError(
                f"{role}.ulysses_sequence_parallel_size ({sequence}) must divide {key} ({divisible_by_sequence})"
            )


def groups_share_no_gpu(config: Config) -> None:
    """Checks that no GPU belongs to two worker groups, unless `services.allow_shared_devices` is true.

    Actor and rollout group never share a GPU: they work at the same time. Critic and rollout group may, in turns.
    """
    for shared in config.shared_devices:
        devices = {role: list(group.devices) for role, group in config.groups.items() if shared in group.devices}
        both = " and ".join(f"services.{role}.devices {of}" for role, of in devices.items())
        if {"actor", "rollout"} <= devices.keys():
            raise ValueError(
                f"{both} overlap, and the groups of actor and rollout work at the same time: give each group its own"
                " GPUs, or remove services.rollout, so that the actor's group samples"
            )
        if not config.services.allow_shared_devices:
            raise ValueError(f"{both} overlap; give each group its own GPUs, or set services.allow_shared_devices")


def groups_in_turns_do_not_sample_ahead(config: Config) -> None:
    """Checks that a rollout group on devices of the critic's group does not sample ahead, while the critic learns."""
    if config.rollout.staleness and config.rollout_shares_devices:
        raise ValueError(
            "rollout.staleness 1 samples while the critic learns, and services.rollout has devices or cpus of"
            " services.critic: give the rollout group its own, or set rollout.staleness to 0"
        )


def gpus_in_turns_are_given_back(config: Config) -> None:
    """Checks that vLLM gives GPU memory back between generations if critic and rollout group take turns on a GPU."""
    rollout = config.rollout
    services = config.services
    if rollout.backend == "vllm" and rollout.vllm.sleep_level == 0 and config.gpus_in_turns:
        raise ValueError(
            "rollout.vllm.sleep_level 0 keeps vLLM's memory while the critic computes, and services.critic.devices"
            f" {list(services.critic.devices)} and services.rollout.devices {list(services.of('rollout').devices)}"
            " overlap: set it to 1 or 2, or give each group its own GPUs"
        )
