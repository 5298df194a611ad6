"""The rows of the reward model: the messages of a prompt and a response, in its own chat template and tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.data.chat_template import Prompt
from controller.data.model_folder import read_description
from controller.data.prompts import PromptBatch
from controller.data.tokenizer import Tokenizer, load_tokenizer
from splitppo.batch import Batch
from splitppo.config import ConfigError, RewardModelConfig

_HF_NUM_LABELS = 2  # where config.json says nothing


@dataclass(frozen=True)
class RewardTokenizer:
    """Renders and encodes rows for the reward model.

    Every row is decoded by the policy's tokenizer and encoded anew, also where both tokenizers are the same: the policy
    sees its prompt with a generation prompt and perhaps cut, and ends its response by itself, while a reward model
    expects whole conversations, ended as its template does. So there is one way for every model.

    Attributes:
        tokenizer: the reward model's; its template renders without a generation prompt.
        max_length: tokens; a longer row loses its first ones, so that the response is kept. None: no limit.
    """

    tokenizer: Tokenizer
    max_length: int | None

    def encode(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Batch:
        """The column reward_tokens: a row for each prompt with its response, as the turn of the assistant.

        A plain string is continued by the response; the tokenizer's own special tokens come round it.
        """
        asked = [_with_response(prompt, text) for prompt, text in zip(prompts, responses, strict=True)]
        texts = [self.tokenizer.chat_template.render(prompt) for prompt in asked]
        rows = [self._cut(ids) for ids in self.tokenizer.encode_batch(asked, texts)]
        return Batch.from_rows(reward_tokens=rows)

    def _cut(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        return ids if self.max_length is None else ids[-self.max_length :]


def load_reward_tokenizer(config: RewardModelConfig, prompts: PromptBatch, *, is_model_here: bool) -> RewardTokenizer:
    """The reward model's tokenizer, tried on the prompts.

    `is_model_here` says whether the model's folder must be: elsewhere only its tokenizer is read.

    Raises:
        ConfigError: a file is missing or unreadable; the model has not one label, or a smaller vocabulary than the
            tokenizer; max_length exceeds its positions; there is no chat template for messages, or it refuses them.
    """
    tokenizer = load_tokenizer(
        config.tokenizer or config.model,
        chat_template=config.chat_template,
        chat_template_kwargs={"add_generation_prompt": False},
        section="reward_model",
        model_key="reward_model.model",
    )
    max_length = _checked_max_length(config, tokenizer) if is_model_here else config.max_length
    reward_tokenizer = RewardTokenizer(tokenizer, max_length)
    for row in prompts.rows:
        if tokenizer.chat_template.template is None and not isinstance(row.prompt, str):
            raise ConfigError(
                f"{row.place}: the prompt has messages, and the tokenizer of the reward model has no chat template;"
                " set reward_model.chat_template to a Jinja file"
            )
        try:
            tokenizer.chat_template.render(_with_response(row.prompt, ""))
        except ValueError as error:
            raise ConfigError(f"{row.place}: reward_model: {error}") from error
    return reward_tokenizer


def _with_response(prompt: Prompt, response: str) -> Prompt:
    if isinstance(prompt, str):
        return prompt + response
    return [*prompt, {"role": "assistant", "content": response}]


def _checked_max_length(config: RewardModelConfig, tokenizer: Tokenizer) -> int | None:
    """Returns the configured length, by default the model's positions. ConfigError if they do not fit together."""
    entries = read_description(config.model, "reward_model.model")
    num_labels = len(entries.get("id2label") or range(entries.get("num_labels", _HF_NUM_LABELS)))
    if num_labels != 1:
        raise ConfigError(f"reward_model.model: expected a sequence classifier with one label, it has {num_labels}")
    vocab_size = entries.get("vocab_size")
    positions = entries.get("max_position_embeddings", entries.get("n_positions"))
    if isinstance(vocab_size, int) and tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer of the reward model (reward_model.tokenizer) has {tokenizer.vocab_size} tokens,"
            f" reward_model.model a vocabulary of {vocab_size}"
        )
    if config.max_length is None:
        return positions if isinstance(positions, int) else None
    if isinstance(positions, int) and config.max_length > positions:
        raise ConfigError(
            f"reward_model.max_length ({config.max_length}) must not exceed the max_position_embeddings of"
            f" reward_model.model ({positions})"
        )
    return config.max_length
