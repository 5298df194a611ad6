"""Makes the tokens between the end of an assistant's turn and the beginning of the next: those of the chat template.

What was sampled is never decoded and encoded again. The tokens come from a conversation that stands in for the real
one: a question, a turn of the assistant, and the messages that follow. They are what the template writes after the
token that ends the assistant's turn. What a template would change in earlier turns, e.g. Qwen3 leaves out their
thinking, is not changed.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from controller.data.chat_template import Messages
from controller.data.environment_text import SIGN, EnvironmentText, Tokens, clean
from controller.data.tokenizer import Tokenizer

_QUESTION = {"role": "user", "content": "?"}
_OF_TOOLS = {"name": "tool", "tool_call_id": "call00000"}  # Mistral takes ids of nine characters alone
_ARGUMENTS: tuple[Any, ...] = ({"sign": SIGN}, json.dumps({"sign": SIGN}, ensure_ascii=False))


class TurnTokens:
    """Makes the tokens that follow the turns of an assistant, for one tokenizer and its chat template.

    Args:
        tokenizer: the tokenizer.
        max_tokens: the most tokens that follow a turn; longer texts are cut in their middle (`EnvironmentText.fit`).
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._template, self._max_tokens = tokenizer.chat_template, max_tokens
        self._text = EnvironmentText(tokenizer)
        self._eos_token_ids = np.array(tokenizer.eos_token_ids, np.int32)
        self._arguments = next(filter(self._takes, _ARGUMENTS), _ARGUMENTS[0])
        # Else the end of a turn is the token that begins what follows (GLM).
        self._has_own_end = self._ends_turns()

    def check(self, role: str) -> None:
        """Checks that messages of a role, tool or user, can follow a turn.

        Raises:
            ValueError: the template refuses such messages or leaves them out, or no token ends the assistant's turn.
        """
        if self._template.template is None:
            return
        message = {"role": role, "content": "observation"}
        if "observation" not in self._after([message], ["observation"], _OF_TOOLS):
            raise ValueError(f"the chat template leaves out messages of the role {role!r}")
        self.reply([message], last_token=-1)

    def reply(self, messages: Messages, *, last_token: int, is_templated: bool = True) -> Tokens:
        """Returns the tokens that follow a turn of the assistant, up to where its next turn begins.

        Args:
            messages: what follows, each with a `role`, tool or user, and `content`; those of tools may have `name` and
                `tool_call_id`.
            last_token: the last token of the turn. If it does not end a turn (length, stop text), the token that does
                is the first of the result.
            is_templated: False: the contents alone are encoded, as they are; so it is without a template, too.

        Raises:
            ValueError: see `check`.
        """
        texts = [clean(message["content"]) for message in messages]
        if not is_templated or self._template.template is None:
            return self._text.fit(texts, lambda contents: self._text.encode("".join(contents)), self._max_tokens)[1]

        def encode(contents: Sequence[str]) -> Tokens:
            try:
                after = self._after(messages, contents, {})
            except ValueError:  # the name or id of a call that the model has made up
                after = self._after(messages, contents, _OF_TOOLS)
            return self._cut(self._text.encode(after), last_token)

        return self._text.fit(texts, encode, self._max_tokens)[1]

    def _after(self, messages: Messages, contents: Sequence[str], of_tools: Mapping[str, str]) -> str:
        """Renders the messages, with these contents, after a stand-in; returns what follows what the assistant says."""
        following = [
            {**self._of_tool(message, of_tools), "role": message["role"], "content": content}
            for message, content in zip(messages, contents, strict=True)
        ]
        return self._said([*self._stand_in(following[0]), *following])

    def _of_tool(self, message: Mapping[str, Any], of_tools: Mapping[str, str]) -> dict[str, str]:
        if message["role"] != "tool":
            return {}
        given = {key: self._text.disarm(clean(message[key])) for key in _OF_TOOLS if isinstance(message.get(key), str)}
        return {**_OF_TOOLS, **given, **of_tools}

    def _stand_in(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns a question and an answer, which calls a tool if a tool's message follows; SIGN is in the answer."""
        answer: dict[str, Any] = {"role": "assistant", "content": SIGN}
        if message["role"] == "tool":
            function = {"name": message["name"], "arguments": self._arguments}
            answer["tool_calls"] = [{"type": "function", "id": message["tool_call_id"], "function": function}]
        return [_QUESTION, answer]

    def _takes(self, arguments: Any) -> bool:
        """Returns whether the template takes the arguments of a call in this form."""
        self._arguments = arguments
        try:
            return bool(self._after([{"role": "tool", "content": ""}], [""], _OF_TOOLS))
        except ValueError:
            return False

    def _ends_turns(self) -> bool:
        """Returns whether the template writes an end-of-sequence token after a last turn of the assistant."""
        try:
            after = self._said([_QUESTION, {"role": "assistant", "content": SIGN}], add_generation_prompt=False)
        except ValueError:
            return False
        return bool(np.isin(self._text.encode(after), self._eos_token_ids).any())

    def _said(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        rendered = self._template.render(messages, add_generation_prompt=add_generation_prompt)
        _, sign, after = rendered.rpartition(SIGN)
        if not sign:
            raise ValueError("the chat template leaves out what the assistant says")
        return after

    def _cut(self, tokens: Tokens, last_token: int) -> Tokens:
        """Cuts tokens that follow what the assistant says at the token that ends its turn."""
        ends = np.flatnonzero(np.isin(tokens, self._eos_token_ids))
        if not len(ends):
            raise ValueError(
                "the chat template ends the assistant's turn with none of the model's end-of-sequence tokens"
            )
        end = ends[0]
        is_over = last_token in self._eos_token_ids if self._has_own_end else last_token == tokens[end]
        return tokens[end + 1 :] if is_over else tokens[end:]
