"""Adds to prompts what their environments said when they began, or replaces them by it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from controller.data.chat_template import Messages
from controller.data.contexts import Context
from controller.data.environment_text import EnvironmentText, Tokens, Write, clean
from controller.data.prompt_files import PromptRow, appended
from controller.data.prompts import PromptBatch, ToolsOf, no_tools
from controller.data.tokenizer import Tokenizer
from splitppo.batch import Column
from splitppo.columns import spec_of


def with_observations(
    batch: PromptBatch,
    texts: Sequence[str | None],
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int,
    tools_of: ToolsOf = no_tools,
) -> PromptBatch:
    """Appends to the last message of the user, in each prompt of a batch, the text that its environment returned.

    Args:
        batch: the prompts.
        texts: a text per prompt; None or "" leaves a prompt as it is.
        tokenizer: the tokenizer of the prompts.
        max_prompt_length: the most tokens of a prompt; a longer text is cut in its middle.
        tools_of: as in `load_prompts`.

    Raises:
        ValueError: a prompt has so many tokens that its text has no room, or the chat template refuses it.
    """
    encoder = EnvironmentText(tokenizer)
    template = tokenizer.chat_template

    def rendered(row: PromptRow, text: str) -> str:
        return template.render(appended(row.prompt, text), tools_of(row.data_source))

    def with_text(row: PromptRow, text: str) -> tuple[str, Tokens, PromptRow]:
        def encode(parts: Sequence[str], write: Write = str) -> Tokens:
            is_plain = not template.applies_to(row.prompt)
            return encoder.encode(rendered(row, write(parts[0])), add_special_tokens=is_plain)

        parts, ids = encoder.fit([clean(text)], encode, max_prompt_length)
        if len(ids) >= max_prompt_length and (alone := len(encode([""]))) >= max_prompt_length:
            raise ValueError(
                f"{row.place}: the prompt has {alone} tokens, which leaves no room in data.max_prompt_length"
                f" ({max_prompt_length}) for the text that the environment begins with; raise it"
            )
        return rendered(row, parts[0]), ids, replace(row, observation=parts[0])

    shown = list(batch.texts)
    prompts = list(batch.prompts.rows())
    rows = list(batch.rows)
    for place, (row, text) in enumerate(zip(batch.rows, texts, strict=True)):
        if text:
            shown[place], prompts[place], rows[place] = with_text(row, text)
    prompts_B = Column.from_rows(prompts, spec_of("prompts").dtype)
    return replace(batch, prompts=prompts_B, texts=tuple(shown), rows=tuple(rows))


def with_contexts(batch: PromptBatch, contexts: Mapping[int, tuple[Messages, Context]]) -> PromptBatch:
    """Replaces the prompts at these places of a batch by contexts, as messages and rendered."""
    if not contexts:
        return batch
    shown = list(batch.texts)
    prompts = list(batch.prompts.rows())
    rows = list(batch.rows)
    for place, (messages, context) in contexts.items():
        shown[place] = context.text
        prompts[place] = context.tokens
        rows[place] = replace(rows[place], prompt=[dict(message) for message in messages])
    prompts_B = Column.from_rows(prompts, spec_of("prompts").dtype)
    return replace(batch, prompts=prompts_B, texts=tuple(shown), rows=tuple(rows))
