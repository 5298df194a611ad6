"""Makes the input of the reward model: prompt and response in the reward model's own chat template and token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

from controller.data.chat_template import Prompt
from controller.data.model_folder import read_description
from controller.data.prompts import PromptBatch
from controller.data.tokenizer import Tokenizer, load_tokenizer
from splitppo.batch import Batch
from splitppo.config import ConfigError
from splitppo.config.sections.reward_model import RewardModelConfig

_HF_NUM_LABELS = 2  # if config.json does not give the number


@dataclass(frozen=True)
class RewardTokenizer:
    """Renders and encodes prompts with their responses for the reward model.

    The policy's tokenizer decodes every row, and this tokenizer encodes it anew, also if both are the same: the
    policy's prompt has a generation prompt and may be cut, and the policy ends its responses itself, but a reward model
    expects whole conversations that end as in its template.

    Attributes:
        tokenizer: the tokenizer of the reward model; its template renders without a generation prompt.
        max_length: the maximum number of tokens of a row; a longer row loses its first tokens. None: no limit.
    """

    tokenizer: Tokenizer
    max_length: int | None

    def encode(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Batch:
        """Encodes each prompt with its response as token ids for the reward model, in the batch column reward_tokens.

        The response is the assistant's message. A response to a plain string continues the string, and the tokenizer
        adds its special tokens.
        """
        asked = [_with_response(prompt, text) for prompt, text in zip(prompts, responses, strict=True)]
        texts = [self.tokenizer.chat_template.render(prompt) for prompt in asked]
        first = None if self.max_length is None else -self.max_length
        return Batch.from_rows(reward_tokens=[ids[first:] for ids in self.tokenizer.encode_batch(asked, texts)])


def load_reward_tokenizer(config: RewardModelConfig, prompts: PromptBatch, *, is_model_here: bool) -> RewardTokenizer:
    """Loads the reward model's tokenizer, and checks that its chat template accepts all prompts.

    `is_model_here` is True if the model's folder must be on this machine; else only its tokenizer is read.

    Raises:
        ConfigError: a file is missing or unreadable; the model has several labels, or a smaller vocabulary than the
            tokenizer; max_length exceeds its positions; there is no chat template, or it refuses a prompt.
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
    """Checks that reward model, tokenizer and max_length fit, else ConfigError; returns the maximum number of tokens.

    Without max_length, the maximum is the number of the model's positions; None if that is not known.
    """
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
