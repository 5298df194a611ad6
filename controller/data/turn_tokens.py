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
from controller.data.environment_text import SIGN, EnvironmentText, Tokens, Write, clean, plain_text
from controller.data.tokenizer import Tokenizer

_QUESTION = {"role": "user", "content": "?"}
OF_TOOL = {"name": "tool", "tool_call_id": "call00000"}  # Mistral takes ids of nine characters alone
# What templates may take: the arguments of a call as a mapping or as text, and any name or id, or those here.
_WAYS: tuple[tuple[Any, Mapping[str, str]], ...] = tuple(
    (arguments, of_tool)
    for of_tool in ({}, OF_TOOL)
    for arguments in ({"sign": SIGN}, json.dumps({"sign": SIGN}, ensure_ascii=False))
)


class TurnTokens:
    """Makes the tokens that follow the turns of an assistant, for one tokenizer and its chat template.

    Args:
        tokenizer: the tokenizer.
        max_tokens: the most tokens that follow a turn; longer texts are cut in their middle (`EnvironmentText.fit`).
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._template = tokenizer.chat_template
        self._max_tokens = max_tokens
        self._text = EnvironmentText(tokenizer)
        self._eos_token_ids = np.array(tokenizer.eos_token_ids, np.int32)
        self._plain: dict[tuple[Any, ...], Tokens] = {}  # of replies of these roles, with `plain_text` alone
        # Else the end of a turn is the token that begins what follows (GLM).
        self._has_own_end = self._template.template is not None and self._ends_last_turn()

    def check(self, role: str) -> None:
        """Checks that messages of a role, tool or user, can follow a turn.

        Raises:
            ValueError: the template refuses such messages or leaves them out, or no token ends the assistant's turn.
        """
        message = {"role": role, "content": "observation"}
        if self._template.template is not None:
            if "observation" not in self._after([message], ["observation"], str):
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

        def encode(contents: Sequence[str], write: Write) -> Tokens:
            if not is_templated or self._template.template is None:
                return self._text.encode("".join(map(write, contents)))
            return self._cut(self._text.encode(self._after(messages, contents, write)), last_token)

        texts = [clean(message["content"]) for message in messages]
        # The tokens of `plain_text` depend on no more than this; all last tokens that end no turn share an entry.
        end = last_token if self._ends_turn(last_token) else None
        alike = (*(message["role"] for message in messages), is_templated, end)
        if alike not in self._plain:
            self._plain[alike] = encode(texts, plain_text)
        return self._text.fit(texts, encode, self._max_tokens, self._plain[alike])[1]

    def _ends_turn(self, token: int) -> bool:
        return bool((self._eos_token_ids == token).any())

    def _after(self, messages: Messages, contents: Sequence[str], write: Write) -> str:
        """Renders the messages, with these contents, after a stand-in; returns what follows what the assistant says."""
        refusal = ValueError()
        for arguments, of_tool in _WAYS:
            following = [
                self._message(message, of_tool, write) | {"content": write(content)}
                for message, content in zip(messages, contents, strict=True)
            ]
            try:
                return self._said([_QUESTION, _answer(following[0], arguments), *following])
            except ValueError as error:
                refusal = error
        raise refusal

    def _message(self, message: Mapping[str, Any], of_tool: Mapping[str, str], write: Write) -> dict[str, str]:
        """Returns a message without its content; the name and the id of a call may be what the model has made up."""
        if message["role"] != "tool":
            return {"role": message["role"]}
        given = {key: write(clean(str(message[key]))) for key in OF_TOOL if message.get(key)}
        return {"role": "tool", **OF_TOOL, **given, **of_tool}

    def _ends_last_turn(self) -> bool:
        """Returns whether the template writes an end-of-sequence token after a last turn of the assistant."""
        try:
            after = self._said([_QUESTION, _answer(_QUESTION, None)], add_generation_prompt=False)
        except ValueError:
            return False
        return bool(np.isin(self._text.encode(after), self._eos_token_ids).any())

    def _said(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """Returns what the template writes after the last SIGN in the messages, where the assistant's words end."""
        rendered = self._template.render(messages, add_generation_prompt=add_generation_prompt)
        _, sign, after = rendered.rpartition(SIGN)
        if not sign:
            raise ValueError("the chat template leaves out what the assistant says")
        return after

    def _cut(self, tokens: Tokens, last_token: int) -> Tokens:
        """Drops what the template writes before the token that ends the assistant's turn.

        That token is dropped, too, if the policy's turn has ended: its `last_token` is any end-of-sequence token. If
        the template has no end of its own (`_has_own_end`), `last_token` must be the very token that begins what
        follows.

        Raises:
            ValueError: the template writes no token that ends a turn.
        """
        ends = np.flatnonzero(np.isin(tokens, self._eos_token_ids))
        if not len(ends):
            raise ValueError(
                "the chat template ends the assistant's turn with none of the model's end-of-sequence tokens"
            )
        end = ends[0]
        is_over = last_token in self._eos_token_ids if self._has_own_end else last_token == tokens[end]
        return tokens[end + 1 :] if is_over else tokens[end:]


def _answer(following: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    """Returns a turn of the assistant that ends with SIGN; it calls a tool if a tool's message follows."""
    answer: dict[str, Any] = {"role": "assistant", "content": SIGN}
    if following["role"] == "tool":
        function = {"name": following["name"], "arguments": arguments}
        answer["tool_calls"] = [{"type": "function", "id": following["tool_call_id"], "function": function}]
    return answer
