"""What a run reads, loaded and checked before any group is started: models, tokenizer, prompts, their rewards."""

from __future__ import annotations

from dataclasses import dataclass

from controller.advantages import check_estimator
from controller.data import PromptDataset, PromptTable, load_train_prompts, load_val_prompts
from controller.kl import check_kl_penalty
from controller.tokenizer import Tokenizer, load_tokenizer, model_folder, read_json
from rewards.manager import check_data_sources
from splitppo.config import Config, ConfigError
from splitppo.config.plan import batch_plan


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
        ConfigError: numbers that do not divide, or a name that is not known.
    """
    batch_plan(config)
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
        ConfigError: a model is missing, or actor and critic have other vocabularies.
    """
    if config.services.launch == "external":
        return None
    actor = _vocab_size(config.actor.model, "actor.model")
    critic = _vocab_size(config.critic.model, "critic.model") if config.uses_critic else None
    if actor is not None and critic is not None and actor != critic:
        raise ConfigError(f"actor.model has a vocabulary of {actor} tokens, critic.model one of {critic}")
    return actor


def _vocab_size(model: str, key: str) -> int | None:
    """Of the model's embedding; None where its config does not say."""
    folder = model_folder(model, key)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{key}: {folder} has no config.json")
    description = read_json(folder / "config.json")
    size = description.get("vocab_size", description.get("text_config", {}).get("vocab_size"))
    return size if isinstance(size, int) else None
