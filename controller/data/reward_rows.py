"""Makes the input of the reward model: prompt and response in the reward model's own chat template and token ids."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from controller.data.chat_template import Messages, Prompt
from controller.data.environment_text import EnvironmentText, Tokens, Write, clean, plain_text
from controller.data.prompt_files import PromptRow
from controller.data.prompts import PromptBatch
from controller.data.tokenizer import Tokenizer, load_tokenizer
from controller.models.folder import read_description
from splitppo.batch import Batch
from splitppo.config import ConfigError
from splitppo.config.section import ScoredTurns
from splitppo.config.sections.reward_model import RewardModelConfig
from splitppo.config_error import config_errors

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
        conversation: the part of a conversation that is scored.
    """

    tokenizer: Tokenizer
    max_length: int | None
    conversation: ScoredTurns = "all"

    def encode(self, rows: Sequence[PromptRow], responses: Sequence[Messages]) -> Batch:
        """Encodes prompts with their responses as token ids for the reward model, in the batch column reward_tokens.

        A response is the assistant's message, or several with those of tools and environments in between, whose texts
        cannot spell special tokens. A response to a plain string continues the string, and the tokenizer adds its
        special tokens.

        Rows in which only the assistant answers are encoded in one call, which is faster.

        Raises:
            ConfigError: the chat template refuses a response.
        """
        pairs = list(zip(rows, responses, strict=True))
        has_other_roles = [bool(row.observation) or len(response) > 1 for row, response in pairs]
        assistant_only = [pair for pair, others in zip(pairs, has_other_roles, strict=True) if not others]
        rendered = [self.render(row, response) for row, response in assistant_only]
        encoded = iter(self.tokenizer.encode_batch([prompt for prompt, _ in rendered], [text for _, text in rendered]))
        tokens = [
            self._encode_with_others(row, response) if others else next(encoded)
            for (row, response), others in zip(pairs, has_other_roles, strict=True)
        ]
        first_kept = None if self.max_length is None else -self.max_length
        return Batch.from_rows(reward_tokens=[ids[first_kept:] for ids in tokens])

    def _encode_with_others(self, row: PromptRow, response: Messages) -> Tokens:
        """Encodes a prompt and its response, in which tools or an environment have a say."""

        def encode(write: Write) -> Tokens:
            asked, text = self.render(row, response, write)
            return self._text.encode(text, add_special_tokens=isinstance(asked, str))

        return self._text.harmless(encode, encode(plain_text))[1]

    def render(self, row: PromptRow, response: Messages, write: Write = str) -> tuple[Prompt, str]:
        """Joins a prompt and its response, as messages or as text, and renders them; returns both.

        `write` makes of the texts of tools and environments those that the template gets.
        """
        asked = _with_response(row, response, write)
        template = self.tokenizer.chat_template
        if template.template is None and not isinstance(asked, str):
            raise ConfigError(
                f"{row.place}: the prompt has messages, and the tokenizer of the reward model has no chat template;"
                " set reward_model.chat_template to a Jinja file"
            )
        hint = "; reward_model.conversation: last_turn needs no other roles" if len(response) > 1 else ""
        with config_errors(ValueError, before=f"{row.place}: reward_model: ", after=hint):
            return asked, template.render(asked)

    @cached_property
    def _text(self) -> EnvironmentText:
        return EnvironmentText(self.tokenizer)


def load_reward_tokenizer(
    config: RewardModelConfig, prompts: PromptBatch, roles: Iterable[str] = (), *, is_model_here: bool
) -> RewardTokenizer:
    """Loads the reward model's tokenizer, and checks that its chat template accepts all prompts.

    `is_model_here` is True if the model's folder must be on this machine; else only its tokenizer is read. `roles` are
    those that answer the policy in conversations.

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
    reward_tokenizer = RewardTokenizer(tokenizer, max_length, config.conversation)
    trial_response = list(as_answer(""))
    if config.conversation == "all":
        for role in roles:
            trial_response += [{"role": role, "content": ""}, *as_answer("")]
    for row in prompts.rows:
        reward_tokenizer.render(row, trial_response)
    return reward_tokenizer


def as_answer(text: str) -> Messages:
    """Returns a text as the assistant's only message."""
    return [{"role": "assistant", "content": text}]


def _with_response(row: PromptRow, response: Messages, write: Write) -> Prompt:
    """Returns the prompt and the messages of its response, as messages, or as one text if the prompt is text.

    Every text that is not the model's goes through `write`: messages of roles other than the assistant, and the
    observation with which an environment began the conversation.
    """
    said = [
        message if message["role"] == "assistant" else {**message, "content": write(clean(message["content"]))}
        for message in response
    ]
    prompt = replace(row, observation=write(row.observation) if row.observation else "").begun_prompt
    return prompt + "".join(each["content"] for each in said) if isinstance(prompt, str) else [*prompt, *said]


def _checked_max_length(config: RewardModelConfig, tokenizer: Tokenizer) -> int | None:
    """Checks that reward model, tokenizer and max_length fit, else ConfigError; returns the maximum number of tokens.

    Without max_length, the maximum is the number of the model's positions; None if that is not known.
    """
    entries = read_description(config.model, "reward_model.model")
    num_labels = len(entries.get("id2label") or range(entries.get("num_labels", _HF_NUM_LABELS)))
    if num_labels != 1:
        raise ConfigError(f"reward_model.model: expected a sequence classifier with one label, it has {num_labels}")
    tokenizer.check_fits(entries.get("vocab_size"), key="reward_model.tokenizer", model_key="reward_model.model")
    positions = entries.get("max_position_embeddings", entries.get("n_positions"))
    if config.max_length is None:
        return positions if isinstance(positions, int) else None
    if isinstance(positions, int) and config.max_length > positions:
        raise ConfigError(
            f"reward_model.max_length ({config.max_length}) must not exceed the max_position_embeddings of"
            f" reward_model.model ({positions})"
        )
    return config.max_length
