"""Decides where a response ends before its maximal length: at stop tokens and stop texts.

Every engine follows this rule: a response ends with the first token
* that is one of the stop tokens, or
* that completes a stop text: the text of the response up to and including that token contains it.

That token stays in the response, also the part of its text after the stop text. Special tokens have no text. A
character whose bytes are spread over tokens appears with the last of them. A stop text may begin in the middle of a
token, but not in the prompt. With vLLM this is `stop=texts, include_stop_str_in_output=True`.

With forced lengths (`debug.response_lengths`) there are no stop tokens and no stop texts; the sampled distribution
stays the policy's own.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

from services.rollout.protocol import Response, Sampling
from splitppo.batch import Array
from splitppo.config import Config
from splitppo.config.subsections.response_lengths import ResponseLengths

log = logging.getLogger(__name__)


def load_stop_rule(model: Any, config: Config) -> "StopRule":
    """Makes the StopRule of a model: its stop tokens (see `stop_token_ids`) and the texts of `rollout.stop`.

    Raises:
        ValueError: see `StopRule`; or there are stop texts, but no tokenizer.
    """
    if config.debug.response_lengths:
        return StopRule((), forced=config.debug.response_lengths)
    texts = config.rollout.stop
    assert config.data.tokenizer is not None, "load resolves it"
    try:
        tokenizer = load_tokenizer(config.data.tokenizer)
    except ValueError as error:
        if texts:
            raise ValueError(f"rollout.stop needs a tokenizer: {error}") from error
        log.warning("there is no tokenizer to read an end-of-sequence id from: %s", error)
        tokenizer = None
    return StopRule(stop_token_ids(model, tokenizer), texts, tokenizer)


def stop_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Collects the end-of-sequence ids of a model's generation config, its config and its tokenizer, ascending.

    Chat models have several: the end of the turn in one place, the end of the text in another. Those of a model that
    reads images may be in its language model's config. Without any such id, responses end at their maximal length.
    `tokenizer` may be None.
    """
    stop_ids: set[int] = set()
    configs = (getattr(model, "generation_config", None), model.config, model.config.get_text_config())
    for source in (*configs, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        stop_ids.update([] if ids is None else ids if isinstance(ids, list | tuple) else [ids])
    if not stop_ids:
        log.warning("neither the model nor its tokenizer names an end-of-sequence id: no response ends early")
    return sorted(map(int, stop_ids))


def load_tokenizer(name: str) -> Any:
    """Loads the Hugging Face tokenizer of a local folder or hub name; ValueError without a usable tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} has no usable tokenizer: {error}") from error
    # Where a folder holds a model alone, Hugging Face makes up a tokenizer of special tokens with ids of its own.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise ValueError(f"{name} has no tokenizer")
    return tokenizer


class StopRule:
    """The stop tokens and stop texts of a run, or its forced lengths; only stop texts need the tokenizer.

    Raises:
        ValueError: a stop text is empty, or the tokenizer cannot decode token by token.
    """

    def __init__(
        self,
        token_ids: Iterable[int],
        texts: Sequence[str] = (),
        tokenizer: Any = None,
        forced: ResponseLengths | None = None,
    ) -> None:
        if not all(texts):
            raise ValueError(f"rollout.stop must hold no empty text, got {list(texts)}")
        self.token_ids = frozenset(token_ids)
        self.texts = tuple(texts)
        self._forced = forced
        self.tokenizer: Any = getattr(tokenizer, "backend_tokenizer", None)
        if texts and self.tokenizer is None:
            raise ValueError(f"rollout.stop needs a fast (tokenizer.json) tokenizer, got {type(tokenizer).__name__}")

    def begin(self, prompt: Array, texts: Sequence[str] = (), *, begun: Iterable[int] = ()) -> "StopWatch":
        """Makes a StopWatch, which decides where a response to this prompt ends; `texts` end this one alone.

        `begun` are tokens that the response has already: a stop text may begin in them.
        """
        watch = StopWatch(self, prompt, (*self.texts, *texts))
        for token in begun if watch.needs_text else ():
            watch.ends_with(token)
        return watch

    def max_tokens(self, seed: int, sampling: Sampling) -> int:
        """Returns the most tokens that the response of this seed may have: its forced length, or the maximal length."""
        most = sampling.max_response_length
        return min(self._forced.of(seed), most) if self._forced else most

    def max_tokens_now(self, response: Response, sampling: Sampling) -> int:
        """Returns the most tokens that a response of one turn may have after this request.

        If that is less than `max_tokens`, and nothing has ended the response before, it is unfinished there.
        """
        return min(self.max_tokens(response.seed, sampling), sampling.most_tokens(response.num_begun))

    def has_ended(self, prompt: Array, tokens: Sequence[int], seed: int, sampling: Sampling) -> bool:
        """Returns True if one of these tokens ends the response that begins with them, or it may have no more."""
        watch = self.begin(prompt)
        return len(tokens) >= self.max_tokens(seed, sampling) or any(map(watch.ends_with, tokens))


class StopWatch:
    """Decides where one response ends, token by token; made by `StopRule.begin`. Decodes texts like vLLM."""

    def __init__(self, rule: StopRule, prompt: Array, texts: Sequence[str]) -> None:
        self._rule = rule
        self._texts = texts
        self.needs_text = bool(texts)
        self._num_kept = max(map(len, texts), default=1) - 1  # characters that a stop text may begin with
        self._tail = ""
        # The prompt matters for tokenizers whose first token loses its leading space.
        self._stream = DecodeStream(ids=prompt.tolist() if texts else [], skip_special_tokens=True)

    def ends_with(self, token: int) -> bool:
        """Adds the next token of a response to this watch; returns True if the response ends with that token."""
        return token in self._rule.token_ids or (self.needs_text and self._completes_a_text(token))

    def _completes_a_text(self, token: int) -> bool:
        """Returns True if a stop text ends in the text of this token; it may have begun in those before."""
        text = self._tail + (self._decode(token) or "")
        self._tail = text[max(0, len(text) - self._num_kept) :]
        return any(stop in text for stop in self._texts)

    def _decode(self, token: int) -> str | None:
        """Returns the text that a token completes, None if more of its character is to come."""
        try:
            return self._stream.step(self._rule.tokenizer, token)
        except Exception as error:
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            # The bytes of the latest tokens are no character: decoding begins anew after them, as in vLLM.
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._rule.tokenizer, token)
