"""Makes the tokens of a context that begins anew: a whole conversation, as the chat template writes it.

All of its texts come from an environment or were said before, so no text may give a special token: it would end a turn,
or begin another role's. What an assistant says there may have the added tokens that assistants write, such as <think>.
"""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

from controller.data.chat_template import Messages, Tools
from controller.data.environment_text import EnvironmentText, Tokens, Write, clean
from controller.data.row_values import check_texts
from controller.data.tokenizer import Tokenizer
from controller.data.turn_tokens import OF_TOOL

_ARGUMENTS = "arguments"
_OF_CALL = ("type", "function")  # key and value: templates compare them


class Context(NamedTuple):
    """A context as the model sees it: its text, and its token ids."""

    text: str
    tokens: Tokens


class ContextTokens:
    """Makes contexts for one tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._template = tokenizer.chat_template
        self._text = EnvironmentText(tokenizer)

    def render(self, messages: Messages, tools: Tools = ()) -> Context:
        """Renders a context up to where the assistant's turn begins; nothing is cut.

        Without a chat template the contents of the messages are encoded, one per line.

        Args:
            messages: with the roles system, user, assistant and tool, and texts as contents.
            tools: JSON schemas of the tools that the model may call.

        Raises:
            ValueError: the template refuses the messages, or takes no tools; a schema or a message spells a special
                token that cannot be written otherwise; there are no tokens.
        """
        self._check_tools(tools)
        refusal = ValueError()
        for with_mapping in (True, False):  # templates take the arguments of a call as a mapping, or as a text
            written = [_message(message, with_mapping) for message in messages]
            try:
                return self._render(written, tools)
            except ValueError as error:
                refusal = refusal if refusal.args else error
        raise refusal

    def _render(self, messages: Messages, tools: Tools) -> Context:
        def render(write: Write, write_assistant: Write) -> str:
            ways = {"assistant": write_assistant}
            texts = [_written(message, ways.get(message["role"], write)) for message in messages]
            written = [{**each, "role": message["role"]} for each, message in zip(texts, messages, strict=True)]
            return self._template.render(written, tools)

        has_template = self._template.template is not None
        text, tokens = self._text.harmless_context(render, add_special_tokens=not has_template)
        if not len(tokens):
            raise ValueError("the messages have no tokens")
        return Context(text, tokens)

    def _check_tools(self, tools: Tools) -> None:
        """Checks the schemas of a context's tools; ValueError: the template takes none, or one spells a token."""

        def check(text: str) -> None:
            if token := self._text.spelled(text):
                raise ValueError(f"the schema of a tool spells {token!r}, which is a special token of the model")

        if tools and not self._takes_tools:
            raise ValueError("there are tools, and the chat template of actor.model takes none; set data.chat_template")
        for tool in tools:
            check_texts(tool, check)

    @cached_property
    def _takes_tools(self) -> bool:
        return self._template.takes_tools


def _message(message: Mapping[str, Any], with_mapping: bool) -> dict[str, Any]:
    """Returns a message as templates take it: one of a tool with name and id, calls with arguments of one kind."""
    if message["role"] == "tool":
        return {**OF_TOOL, **message}
    if not message.get("tool_calls"):
        return dict(message)
    return {**message, "tool_calls": [_call(call, with_mapping) for call in message["tool_calls"]]}


def _call(call: Mapping[str, Any], with_mapping: bool) -> Mapping[str, Any]:
    """Returns a call of a tool with its arguments as a mapping, if they are one of plain texts, or as JSON."""
    function = call["function"]
    arguments = function.get(_ARGUMENTS)
    if isinstance(arguments, str) and with_mapping:
        try:
            read = json.loads(arguments)
            check_texts(read)
        except (ValueError, RecursionError):  # the model may have written it: too deep, or half of a surrogate pair
            read = None
        arguments = read if isinstance(read, dict) else arguments
    if isinstance(arguments, Mapping) and not with_mapping:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, _ARGUMENTS: arguments}}


def _written(value: Any, write: Write, *, with_keys: bool = False) -> Any:
    """Returns a value of a message with its texts written, at any depth; of mappings only arguments have free keys."""
    if isinstance(value, str):
        return write(clean(value))
    if isinstance(value, Mapping):
        written = {}
        for key, each in value.items():
            written_key = write(clean(key)) if with_keys else key
            is_kind = (key, each) == _OF_CALL
            in_arguments = with_keys or key == _ARGUMENTS
            written[written_key] = each if is_kind else _written(each, write, with_keys=in_arguments)
        return written
    if isinstance(value, list | tuple):
        return [_written(each, write, with_keys=with_keys) for each in value]
    return value
