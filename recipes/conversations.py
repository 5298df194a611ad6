"""Makes the small models of recipes that converse: tokenizer, chat template, and warm start on made conversations."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.qwen2_tokenizer import PRINTABLE, character_tokenizer, save_tokenizer
from recipes.tiny_models import END, NAMED_TOKENS, PAD, START

# Makes the chat messages of a conversation.
Conversation = Callable[[random.Random], list[dict[str, str]]]
_MAX_LENGTH = 128  # tokens of prompt and response


@dataclass(frozen=True)
class Language:
    """The tokens of a recipe's conversations.

    Attributes:
        words: texts that are one token each; any other character is one, too.
        chat_template: marks what the assistant says, for the warm start.
        tools: the schemas of the tools that the model is shown.
    """

    words: Sequence[str]
    chat_template: str
    tools: Sequence[Mapping[str, Any]] = ()


def make_model(
    folder: Path,
    language: Language,
    conversation: Conversation,
    num_steps: int,
    *,
    seed: int,
    hidden_size: int = 64,
) -> None:
    """Makes a model with its tokenizer in a folder, by supervised steps on what it says in made conversations."""
    from recipes import warm_start  # imports torch, which a folder that is ready does not need

    tokenizer = character_tokenizer(PRINTABLE, [PAD, START, END], language.words)
    save_tokenizer(tokenizer, folder, named_tokens=NAMED_TOKENS, chat_template=language.chat_template)
    config = warm_start.small_qwen2(
        tokenizer, eos=END, pad=PAD, max_position_embeddings=_MAX_LENGTH, hidden_size=hidden_size
    )
    said = examples(folder, conversation, seed, language.tools)
    warm_start.train(config, said, num_steps, seed=seed).save_pretrained(folder)


def examples(
    model: Path, conversation: Conversation, seed: int, tools: Sequence[Mapping[str, Any]] = ()
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields conversations without end, in the chat template of a model's folder; the model learns its own turns."""
    from transformers import AutoTokenizer

    from recipes.warm_start import IGNORED

    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(model)
    while True:
        rendered = tokenizer.apply_chat_template(
            conversation(rng), tools=list(tools) or None, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = rendered["input_ids"]
        is_said = rendered["assistant_masks"]
        yield ids, [token if said else IGNORED for token, said in zip(ids, is_said, strict=True)]
