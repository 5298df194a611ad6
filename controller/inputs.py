"""What a run reads, loaded and checked before any group is started: models, tokenizer, prompts, their rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller.advantages import check_estimator
from controller.data import PromptDataset, PromptTable, load_train_prompts, load_val_prompts
from controller.kl import check_kl_penalty
from controller.tokenizer import Tokenizer, load_tokenizer, model_folder, read_json
from rewards.manager import check_data_sources
from splitppo.config import Config, ConfigError
from splitppo.config.packages import check_rollout_packages
from splitppo.config.plan import batch_plan, longest_row


@dataclass(frozen=True)
class Inputs:
    """Tokenizer and prompts.

    Attributes:
        tokenizer: of the policy.
        prompts: for training.
        val_prompts: for validation; None if there are none.
    """

    tokenizer: Tokenizer
    prompts: PromptDataset
    val_prompts: PromptTable | None

    @property
    def data_sources(self) -> frozenset[str]:
        """All that need a reward."""
        validated = self.val_prompts.data_sources if self.val_prompts is not None else frozenset[str]()
        return self.prompts.table.data_sources | validated


def check_config(config: Config) -> None:
    """Checks what goes beyond single keys.

    Raises:
        ConfigError: numbers that do not divide or do not fit, a name that is not known, or a rollout engine that the
            ranks started here would not find.
    """
    batch_plan(config)
    if config.services.launch == "local":
        check_rollout_packages(config)
    check_estimator(config.algorithm.adv_estimator)
    check_kl_penalty(config.algorithm.kl_penalty)


def load_inputs(config: Config) -> Inputs:
    """Checks the config and reads what it names.

    Raises:
        ConfigError: something is missing, unreadable or does not fit together; one sentence.
    """
    check_config(config)
    data, vocab_size = config.data, check_models(config)
    tokenizer = load_tokenizer(
        data.tokenizer or config.actor.model,
        chat_template=data.chat_template,
        chat_template_kwargs=data.apply_chat_template_kwargs,
    )
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer (data.tokenizer) has {tokenizer.vocab_size} tokens,"
            f" actor.model a vocabulary of {vocab_size}"
        )
    inputs = Inputs(
        tokenizer, load_train_prompts(data, tokenizer, seed=config.run.seed), load_val_prompts(data, tokenizer)
    )
    check_data_sources(config.reward, inputs.data_sources)
    return inputs


def check_models(config: Config) -> int | None:
    """The size of the vocabulary of actor and critic; None where it is not known on this machine.

    With external services the models need not be here.

    Raises:
        ConfigError: a model is missing; actor and critic have other vocabularies; rows may be longer than a model has
            positions; vLLM's ranks cannot share the attention heads of the actor.
    """
    if config.services.launch == "external":
        return None
    actor = _describe(config.actor.model, "actor.model")
    _check_positions(config, actor, "actor.model")
    if config.rollout.backend == "vllm":
        _check_vllm(config, actor)
    actor_size, critic_size = _number(actor, "vocab_size"), None
    if config.uses_critic:
        critic = _describe(config.critic.model, "critic.model")
        _check_positions(config, critic, "critic.model")
        critic_size = _number(critic, "vocab_size")
    if actor_size is not None and critic_size is not None and actor_size != critic_size:
        raise ConfigError(f"actor.model has a vocabulary of {actor_size} tokens, critic.model one of {critic_size}")
    return actor_size


def _describe(model: str, key: str) -> Mapping[str, Any]:
    """A model's config.json; where it nests what concerns text, with that part in its place."""
    folder = model_folder(model, key)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{key}: {folder} has no config.json")
    description = read_json(folder / "config.json")
    return {**description.get("text_config", {}), **description}


def _number(description: Mapping[str, Any], name: str) -> int | None:
    """An integer of a model's config; None where it does not say."""
    value = description.get(name)
    return value if isinstance(value, int) else None


def _check_positions(config: Config, description: Mapping[str, Any], key: str) -> None:
    positions, longest = _number(description, "max_position_embeddings"), longest_row(config.data)
    if positions is not None and longest > positions:
        raise ConfigError(
            f"{key} has max_position_embeddings {positions}, fewer than data.max_prompt_length +"
            f" data.max_response_length ({longest} tokens); lower data.max_prompt_length or data.max_response_length"
        )


def _check_vllm(config: Config, description: Mapping[str, Any]) -> None:
    """Refuses what vLLM could not load, once the whole group stands."""
    vllm = config.rollout.vllm
    positions = _number(description, "max_position_embeddings")
    if vllm.max_model_len is not None and positions is not None and vllm.max_model_len > positions:
        raise ConfigError(
            f"rollout.vllm.max_model_len ({vllm.max_model_len}) must not exceed the max_position_embeddings of"
            f" actor.model ({positions}); lower rollout.vllm.max_model_len"
        )
    ranks, heads = vllm.tensor_model_parallel_size, _number(description, "num_attention_heads")
    if heads is not None and heads % ranks:
        raise ConfigError(
            f"the num_attention_heads of actor.model ({heads}) must be a multiple of"
            f" rollout.vllm.tensor_model_parallel_size ({ranks}); change rollout.vllm.tensor_model_parallel_size"
        )
    key_values = _number(description, "num_key_value_heads")
    if key_values is not None and key_values % ranks and ranks % key_values:
        raise ConfigError(
            f"the num_key_value_heads of actor.model ({key_values}) must be a multiple or a divisor of"
            f" rollout.vllm.tensor_model_parallel_size ({ranks}); change rollout.vllm.tensor_model_parallel_size"
        )
