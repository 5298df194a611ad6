"""Checks the models that a run names: their files and sizes, and that they fit each other, the rows and the ranks."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from controller.models.folder import model_folder, read_description
from controller.models.shape import (
    TIED_OUTPUT_LAYER,
    Kind,
    adapter_sizes,
    has_value_head,
    is_linear,
    is_output_layer_tied,
    linear_layers,
    loaded_weights,
    read_shapes_in,
    read_tensor_shapes,
)
from controller.models.tied_weights import check_tied_weights
from splitppo.config import ComputedModelConfig, Config, ConfigError, TrainedModelConfig
from splitppo.config.adapter_files import ADAPTER_WEIGHTS, NAME_PREFIX, check_adapter
from splitppo.config.attention_heads import check_heads
from splitppo.config.frozen_weights import frozen_names, refuse_all_frozen
from splitppo.config.rope import rope_switch
from splitppo.config.section import TrainedRoleName
from splitppo.config_error import config_errors
from splitppo.images.settings import FAMILIES
from splitppo.plain_file import read_plain
from splitppo.weight_files import EXPECTED


def check_models(config: Config) -> int | None:
    """Checks the models of the run, and returns the size of the policy's vocabulary, in tokens.

    Returns None if the size is not known: groups that somebody else starts may have their models elsewhere.

    Raises:
        ConfigError: a model is missing, or its weights are missing or torn; a teacher has a smaller vocabulary than the
            policy, so that it could not rate every id; rows may be longer than a model has positions, or rotates by the
            same factors; ranks that share an engine of vLLM, or the positions of rows, cannot share the attention heads
            of a model.
    """
    if config.services.launch == "external":
        return None
    if config.reward_model_host is not None:
        _check_weights(config.reward_model.model, "reward_model.model")
        _check_is_no_privileged_critic(config.reward_model.model, "reward_model.model")
    for role in config.trained_roles:
        _check_adapter(config.trained_model_of(role), role)
        _check_freeze(config.trained_model_of(role), role)
        _check_sequence_groups(config, role)
    actor = _read_sizes(config, config.actor.model, "actor.model", config.actor.override_config)
    _check_rope(config)
    if config.rollout.backend == "vllm":
        _check_vllm(config, actor)
    vocab_size = actor.get("vocab_size")
    for folder in config.teacher.folders:
        key = config.teacher.key_of(folder)
        teacher_size = _read_sizes(config, folder, key, config.teacher.override_config).get("vocab_size")
        if vocab_size is not None and (teacher_size or vocab_size) < vocab_size:
            raise ConfigError(f"{key} has a vocabulary of {teacher_size} tokens, fewer than actor.model ({vocab_size})")
    if config.uses_critic:
        _read_sizes(config, config.critic.model, "critic.model", config.critic.override_config)
    return vocab_size


def _check_adapter(model: TrainedModelConfig, role: str) -> None:
    """Checks that a list of target layers names layers of a local model, and the adapter that training begins with."""
    folder = Path(model.model).expanduser()
    targets = model.target_modules
    if model.lora_rank and not isinstance(targets, str) and folder.is_dir():
        shapes = read_tensor_shapes(folder, f"{role}.model").items()
        layers = [name.removesuffix(".weight") for name, shape in shapes if is_linear(name, shape)]
        known = dict.fromkeys(name.rpartition(".")[2] for name in layers if re.search(r"\.\d+\.", name))
        for part in targets:
            if not any(f".{name}".endswith(f".{part}") for name in layers):
                raise ConfigError(
                    f"{role}.target_modules: {part} is no linear layer of {folder}; it has {', '.join(known)}"
                )
    if model.lora_adapter_path is not None:
        folder = model_folder(model.lora_adapter_path, f"{role}.lora_adapter_path")
        with config_errors(ValueError):
            check_adapter(folder, role, model)


def _check_freeze(model: TrainedModelConfig, role: TrainedRoleName) -> None:
    """Checks that each pattern of `freeze` names a weight of a local model that would learn, and not all of them."""
    folder = Path(model.model).expanduser()
    if not (model.freeze and folder.is_dir()):
        return
    kind: Kind = "policy" if role == "actor" else "value"
    shapes = read_tensor_shapes(folder, f"{role}.model")
    is_tied = kind == "policy" and is_output_layer_tied(read_description(model.model, f"{role}.model"), shapes)
    names = {*loaded_weights(shapes, kind, is_tied=is_tied)}
    aliases = {TIED_OUTPUT_LAYER} if is_tied and not model.lora_rank else set()
    if model.lora_rank:
        adapters = {*adapter_sizes(linear_layers(shapes), model)}
        if not adapters:
            return  # the group tells which layers have adapters
        names = adapters | {name for name in names | _names_in_adapter(model, role) if has_value_head([name])}
    with config_errors(ValueError):
        frozen = frozen_names(model, names | aliases, role)
        if frozen.issuperset(names) and (kind == "policy" or has_value_head(names)):
            raise refuse_all_frozen(model, role)


def _names_in_adapter(model: TrainedModelConfig, role: TrainedRoleName) -> set[str]:
    """Returns the names of the weights in the adapter that training begins with; none without `lora_adapter_path`."""
    if model.lora_adapter_path is None:
        return set()
    key = f"{role}.lora_adapter_path"
    with config_errors(ValueError, before=f"{key}: "):
        shapes = read_shapes_in(model_folder(model.lora_adapter_path, key) / ADAPTER_WEIGHTS)
    return {name.removeprefix(NAME_PREFIX) for name in shapes}


def _read_sizes(config: Config, model: str, key: str, override: Mapping[str, Any]) -> Mapping[str, int]:
    """Reads the integers of a model's config.json by name; ConfigError if rows are too long for it.

    They are those of its language model, if it reads images, too.
    """
    entries = {**read_description(model, key), **override}
    kind = str(entries.get("model_type"))
    is_vision_model = "vision_config" in entries and "_vl" in kind  # of others transformers may have a text model
    if is_vision_model and (kind not in FAMILIES or key not in ("actor.model", "critic.model")):
        families = " and ".join(FAMILIES)
        raise ConfigError(
            f"{key} is a vision-language model ({kind}); only text models can be used here, and {families} as"
            " actor.model and critic.model"
        )
    _check_weights(model, key)
    if key != "critic.model" and (folder := Path(model).expanduser()).is_dir():  # a value model has no output layer
        check_tied_weights(folder, entries, key)
    sizes = {name: value for name, value in entries.items() if isinstance(value, int)}
    role: TrainedRoleName = "critic" if key == "critic.model" else "actor"
    longest = config.longest_row_of(role)
    if longest > sizes.get("max_position_embeddings", longest):
        raise ConfigError(
            f"{key} has max_position_embeddings {sizes['max_position_embeddings']}, fewer than"
            f" {config.longest_row_keys_of(role)} ({longest} tokens); lower the latter, or raise it in"
            f" {key.partition('.')[0]}.override_config"
        )
    return sizes


def _check_rope(config: Config) -> None:
    """Raises ConfigError if a response may become so long that the policy would rotate its first tokens otherwise."""
    switch = rope_switch({**read_description(config.actor.model, "actor.model"), **config.actor.override_config})
    longest = config.longest_context
    if switch is not None and longest > switch:
        raise ConfigError(
            f"actor.model has longrope, whose factors change for rows of over {switch} tokens: a token would be sampled"
            f" with other factors than those it is learned with; lower {config.longest_context_keys} ({longest})"
        )


def _check_weights(model: str, key: str) -> None:
    """Checks the weights in a local model folder; ConfigError if missing or torn. Models of the hub are not checked."""
    folder = Path(model).expanduser()
    if folder.is_dir() and not read_tensor_shapes(folder, key):
        raise ConfigError(f"{key}: {folder} has no weights: expected {EXPECTED}")


def _check_is_no_privileged_critic(model: str, key: str) -> None:
    """Checks that a model that scores is no critic, in a run folder, that has learned with a privileged text.

    Its scores would teach the policy what the critic alone may know. A copy elsewhere cannot be told from other models.

    Raises:
        ConfigError: it is one.
    """
    folder = Path(model).expanduser().absolute()
    for parent in folder.parents:
        if parent.name != "checkpoints" or "critic" not in folder.relative_to(parent).parts:
            continue
        stored = parent.parent / "config.yaml"
        with suppress(OSError, yaml.YAMLError):
            tree = yaml.safe_load(read_plain(stored))
            critic = tree.get("critic") if isinstance(tree, dict) else None
            if isinstance(critic, dict) and critic.get("privileged_prompt") is not None:
                raise ConfigError(
                    f"{key}: {folder} is a critic that has learned with critic.privileged_prompt ({stored}), so as a"
                    " reward it would teach the policy what the critic alone may know: take another model"
                )


def _check_vllm(config: Config, actor: Mapping[str, int]) -> None:
    """Raises ConfigError for settings that vLLM would refuse for this actor only after the whole group has started."""
    vllm = config.rollout.vllm
    positions = actor.get("max_position_embeddings")
    if positions is not None and vllm.max_model_len is not None and vllm.max_model_len > positions:
        raise ConfigError(
            f"rollout.vllm.max_model_len ({vllm.max_model_len}) must not exceed the max_position_embeddings of"
            f" actor.model ({positions}); lower rollout.vllm.max_model_len"
        )
    key = "rollout.vllm.tensor_model_parallel_size"
    _check_heads(actor, vllm.tensor_model_parallel_size, key, "actor.model")


def _check_heads(sizes: Mapping[str, Any], num_ranks: int, key: str, model: str) -> None:
    with config_errors(ValueError):
        check_heads(sizes.get("num_attention_heads"), sizes.get("num_key_value_heads"), num_ranks, key, model)


def _check_sequence_groups(config: Config, role: TrainedRoleName) -> None:
    """Checks that ranks which divide the positions of rows can do so with all models of their group."""
    num_ranks = config.trained_model_of(role).ulysses_sequence_parallel_size
    key = "ulysses_sequence_parallel_size"
    for name, model in _models_of(config, role) if num_ranks > 1 else ():
        if model.use_remove_padding is False:
            section = name.partition(".")[0]
            raise ConfigError(f"{role}.{key} ({num_ranks}) needs packed rows: set {section}.use_remove_padding to true")
        _check_heads(read_description(model.model, name), num_ranks, f"{role}.{key}", name)


def _models_of(config: Config, role: TrainedRoleName) -> Iterator[tuple[str, ComputedModelConfig]]:
    """Yields the models of a group, the frozen ones as well, by key."""
    yield f"{role}.model", config.trained_model_of(role)
    if role != "actor" and config.reference_host == role:  # the reference is the actor's model before training
        yield "actor.model", config.actor
    if config.reward_model_host == role:
        yield "reward_model.model", config.reward_model
    if config.teacher_host == role:
        yield from ((config.teacher.key_of(folder), config.teacher.of(folder)) for folder in config.teacher.folders)
