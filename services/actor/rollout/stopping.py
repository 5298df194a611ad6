"""When a response ends before its maximal length.

The rule, which every engine follows: a response ends with the first token
* that is one of the stop tokens, or
* that completes a stop text: the text of the response up to and including that token contains it.

That token stays in the response, and so does what it says beyond the stop text. Special tokens have no text. A
character whose bytes are spread over tokens appears with the last of them. A stop text may begin in the middle of a
token, but not in the prompt. With vLLM this is `stop=texts, include_stop_str_in_output=True`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream
from torch import nn

from services.actor.rollout.stop_tokens import load_tokenizer, stop_token_ids
from splitppo.batch import Array


def load_stop_rule(model: nn.Module, tokenizer: str, texts: Sequence[str]) -> StopRule:
    """The rule of a model: its stop tokens (see `stop_token_ids`) and the texts of `rollout.stop`.

    Args:
        model: a Hugging Face model.
        tokenizer: local folder or hub name; may be missing where there are no texts.
        texts: each of them ends a response.

    Raises:
        ValueError: see `StopRule`; or texts, and no tokenizer.
    """
    token_ids = stop_token_ids(model, tokenizer)
    if not texts:
        return StopRule(token_ids)
    try:
        loaded = load_tokenizer(tokenizer)
    except ValueError as error:
        raise ValueError(f"rollout.stop needs a tokenizer: {error}") from error
    return StopRule(token_ids, texts, loaded)


class StopRule:
    """Stop tokens and stop texts.

    Args:
        token_ids: each of them ends a response.
        texts: none empty; each of them ends a response that contains it.
        tokenizer: a Hugging Face tokenizer that turns tokens into text; not needed without texts.

    Attributes:
        token_ids, texts: as given.

    Attributes:
        token_ids, texts: as given.

    Raises:
        ValueError: a text is empty, or the tokenizer cannot decode token by token.
    """

    def __init__(self, token_ids: Iterable[int], texts: Sequence[str] = (), tokenizer: Any = None) -> None:
        if not all(texts):
            raise ValueError(f"rollout.stop must hold no empty text, got {list(texts)}")
        self.token_ids, self.texts = frozenset(token_ids), tuple(texts)
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", None)
        if texts and self._tokenizer is None:
            raise ValueError(f"rollout.stop needs a fast (tokenizer.json) tokenizer, got {type(tokenizer).__name__}")

    def begin(self, prompt: Array) -> StopWatch:
        """Watches a new response to the prompt."""
        return StopWatch(self.token_ids, _TextWatch(self.texts, self._tokenizer, prompt) if self.texts else None)


class StopWatch:
    """Watches one response; made by `StopRule.begin`."""

    def __init__(self, token_ids: frozenset[int], texts: _TextWatch | None) -> None:
        self._token_ids, self._texts = token_ids, texts

    def ends_with(self, token: int) -> bool:
        """Whether the response ends with this token, its next one."""
        return token in self._token_ids or (self._texts is not None and self._texts.completes(token))


class _TextWatch:
    """The end of one response's text; decoded like vLLM decodes it."""

    def __init__(self, texts: tuple[str, ...], tokenizer: Any, prompt: Array) -> None:
        self._texts, self._tokenizer = texts, tokenizer
        self._num_kept = max(map(len, texts)) - 1  # characters of which a text may still become
        self._tail = ""
        # The prompt matters for tokenizers whose first token loses its leading space.
        self._stream = DecodeStream(ids=prompt.tolist(), skip_special_tokens=True)

    def completes(self, token: int) -> bool:
        text = self._tail + (self._decode(token) or "")
        self._tail = text[len(text) - self._num_kept :] if len(text) > self._num_kept else text
        return any(stop in text for stop in self._texts)

    def _decode(self, token: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer, token)
        except Exception as error:
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            # Bytes that are no character: begin anew behind them, as vLLM does.
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._tokenizer, token)
