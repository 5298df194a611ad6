"""What a run reads, loaded and checked before any group is started: models, tokenizer, prompts, their rewards."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from controller.data.model_folder import model_folder, read_json
from controller.data.prompts import PromptBatch, PromptDataset, load_prompts
from controller.data.reward_rows import RewardTokenizer, load_reward_tokenizer
from controller.data.tokenizer import Tokenizer, load_tokenizer
from rewards.manager import RewardManager
from rewards.terms import check_scorers, scored_sources
from splitppo.config import Config, ConfigError, RewardConfig
from splitppo.config.batch_plan import batch_plan
from splitppo.config.rollout_packages import check_rollout_packages

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """The tokenizers of policy and reward model, and the prompts for training and, where there are any, validation."""

    tokenizer: Tokenizer
    prompts: PromptDataset
    val_prompts: PromptBatch | None
    reward_tokenizer: RewardTokenizer | None = None

    @property
    def data_sources(self) -> frozenset[str]:
        """All that need a reward."""
        return self.prompts.table.data_sources | (self.val_prompts.data_sources if self.val_prompts else frozenset())

    def scored_sources(self, config: RewardConfig) -> frozenset[str]:
        """Those that need a reward function: all, but for the ones that have none where a reward model scores."""
        return self.data_sources if self.reward_tokenizer is None else scored_sources(config, self.data_sources)


def check_config(config: Config) -> None:
    """Checks what goes beyond single keys.

    Raises:
        ConfigError: numbers that do not divide or fit, or a rollout backend that ranks started here would not find.
    """
    batch_plan(config)
    if config.services.launch == "local":
        check_rollout_packages(config)


def load_inputs(config: Config) -> Inputs:
    """Reads what the config names; ConfigError if something is missing, unreadable or does not fit together."""
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
    table = load_prompts(data, tokenizer, "train")
    prompts = PromptDataset(table, batch_size=data.train_batch_size, seed=config.run.seed, shuffle=data.shuffle)
    val_prompts = load_prompts(data, tokenizer, "val") if data.val_files else None
    reward_tokenizer = None
    if config.reward_model_host is not None:
        is_model_here = config.services.launch == "local"
        reward_tokenizer = load_reward_tokenizer(config.reward_model, table, is_model_here=is_model_here)
        val_prompts = _with_functions(val_prompts, config) if val_prompts else None
    inputs = Inputs(tokenizer, prompts, val_prompts, reward_tokenizer)
    check_scorers(config.reward, inputs.scored_sources(config.reward))
    return inputs


async def check_rewards(config: Config, inputs: Inputs) -> None:
    """Starts what scores, and ends it again. ConfigError if it cannot be started, e.g. because of a user's function."""
    async with RewardManager(config.reward, inputs.scored_sources(config.reward)):
        pass


def _with_functions(val_prompts: PromptBatch, config: Config) -> PromptBatch | None:
    """The validation prompts whose sources have a reward function; None if no source has: a model validates nothing."""
    judged = scored_sources(config.reward, val_prompts.data_sources)
    if without := sorted(val_prompts.data_sources - judged):
        log.warning(
            "validation is by reward functions, and data_source %s has none: its prompts are left out of it",
            ", ".join(without),
        )
    places = np.flatnonzero([row.data_source in judged for row in val_prompts.rows])
    return val_prompts.take(places) if len(places) else None


def check_models(config: Config) -> int | None:
    """The size of the vocabulary of actor and critic; None where it is not known: the models need not be here.

    Raises:
        ConfigError: a model is missing; actor and critic have other vocabularies; rows may be longer than a model has
            positions; vLLM's ranks cannot share the attention heads of the actor.
    """
    if config.services.launch == "external":
        return None
    actor = _read_sizes(config, config.actor.model, "actor.model")
    if config.rollout.backend == "vllm":
        _check_vllm(config, actor)
    vocab_size = actor.get("vocab_size")
    if config.uses_critic:
        critic_size = _read_sizes(config, config.critic.model, "critic.model").get("vocab_size", vocab_size)
        if vocab_size is not None and critic_size != vocab_size:
            raise ConfigError(f"actor.model has a vocabulary of {vocab_size} tokens, critic.model one of {critic_size}")
    return vocab_size


def _read_sizes(config: Config, model: str, key: str) -> Mapping[str, int]:
    """The integers of a model's config.json, those of its text_config too. ConfigError if rows do not fit into it."""
    file = model_folder(model, key) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{key}: {file.parent} has no config.json")
    description = read_json(file)
    entries = description.get("text_config", {}) | description
    sizes = {name: value for name, value in entries.items() if isinstance(value, int)}
    longest = config.data.longest_row
    if longest > sizes.get("max_position_embeddings", longest):
        raise ConfigError(
            f"{key} has max_position_embeddings {sizes['max_position_embeddings']}, fewer than data.max_prompt_length +"
            f" data.max_response_length ({longest} tokens); lower data.max_prompt_length or data.max_response_length"
        )
    return sizes


def _check_vllm(config: Config, actor: Mapping[str, int]) -> None:
    """Refuses what vLLM could not load, once the whole group stands."""
    vllm = config.rollout.vllm
    positions = actor.get("max_position_embeddings")
    if positions is not None and vllm.max_model_len is not None and vllm.max_model_len > positions:
        raise ConfigError(
            f"rollout.vllm.max_model_len ({vllm.max_model_len}) must not exceed the max_position_embeddings of"
            f" actor.model ({positions}); lower rollout.vllm.max_model_len"
        )
    ranks, key = vllm.tensor_model_parallel_size, "rollout.vllm.tensor_model_parallel_size"
    heads, key_values = actor.get("num_attention_heads", ranks), actor.get("num_key_value_heads", ranks)
    if heads % ranks:
        wrong = f"num_attention_heads of actor.model ({heads}) must be a multiple"
    elif key_values % ranks and ranks % key_values:
        wrong = f"num_key_value_heads of actor.model ({key_values}) must be a multiple or a divisor"
    else:
        return
    raise ConfigError(f"the {wrong} of {key} ({ranks}); change {key}")
