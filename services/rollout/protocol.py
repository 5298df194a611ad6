"""The interface of rollout backends, which sample responses: methods, weights, responses, sampling parameters."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from services.engine.batching.micro_batch_images import RowImages, images_of_rows
from splitppo.batch import Array, Batch
from splitppo.config.sections.rollout import MIN_TEMPERATURE
from splitppo.v1.conversation_pb2 import TurnLimits, TurnReply


class PolicyWeights(Protocol):
    """The policy model as a rollout backend sees it: the model and ways to get its whole weights."""

    model: Any  # of Hugging Face; its weights may be sharded over the ranks

    def gathered(self) -> AbstractContextManager[Any]:
        """Gives a `with` block the model with whole weights, in eval mode, to generate under no_grad. Collective."""

    def whole_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, whole tensor) of each parameter in this dtype, tied ones once. Collective."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters in the order of use: temperature, then top-k, then top-p on the rest of the tokens.

    Raises:
        ValueError: a value lies outside its range.
    """

    temperature: float  # at least MIN_TEMPERATURE as a float32, in which it travels; 0: greedy, without top_p and top_k
    top_p: float  # nucleus, in (0, 1]; 1 keeps every token
    top_k: int  # most likely tokens kept; 0 keeps every token
    max_response_length: int  # tokens, at least 1; the stop token counts
    max_step_tokens: int = 0  # the most tokens of a response that one request samples; 0: all of them

    def __post_init__(self) -> None:
        if self.temperature != 0.0 and not np.float32(MIN_TEMPERATURE) <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, and finite, got {self.temperature:g}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (every token) or positive, got {self.top_k}")
        if self.max_response_length < 1:
            raise ValueError(f"max_response_length must be at least 1, got {self.max_response_length}")
        if self.max_step_tokens < 0:
            raise ValueError(f"max_step_tokens must be 0 (no limit) or positive, got {self.max_step_tokens}")

    def most_tokens(self, num_begun: int) -> int:
        """Returns the most tokens that a response of one turn has after a request before which it had `num_begun`."""
        return min(self.max_response_length, num_begun + (self.max_step_tokens or self.max_response_length))


@dataclass(eq=False)
class Response:
    """One response to a prompt while its tokens are being sampled.

    `log_probs` are those of log-softmax(logits / temperature) (greedy: of the logits), before top-k and top-p. Up to
    rounding they equal the log-probs that the training forward computes for the same tokens.
    """

    index: int  # among the responses of its rank, which are ordered by prompt, then seed
    prompt: Array  # token ids, at least one; responses to the same prompt share the array
    seed: int  # int64, of the random numbers by which its tokens are sampled
    images: RowImages = ()  # those in the prompt, in order
    row: int = 0  # of the prompt among the rows of its rank
    tokens: array[int] = field(default_factory=lambda: array("i"))  # int32; a stop token is the last one of a turn
    log_probs: array[float] = field(default_factory=lambda: array("f"))  # float32, one per token
    place: int = 0  # among all responses of the request; without column `places` the same as `index`
    replies: list[range] = field(default_factory=list)  # the positions of each reply to a turn, in order
    contexts: list[range] = field(default_factory=list)  # those replies that are contexts which begin anew
    limits: TurnLimits = field(default_factory=TurnLimits)  # of the turn after the latest reply
    num_begun: int = 0  # tokens that it had before this request
    is_unfinished: bool = False  # it was cut by `Sampling.max_step_tokens`, and may go on in another request

    @property
    def mask(self) -> Array:
        """[T] uint8, one per token: 1 for sampled tokens, 0 for those of replies."""
        mask = np.ones(len(self.tokens), np.uint8)
        for reply in self.replies:
            mask[reply.start : reply.stop] = 0
        return mask

    @property
    def turn_tokens(self) -> list[int]:
        """The tokens that have been sampled since the latest reply."""
        return self.tokens[self.replies[-1].stop if self.replies else 0 :].tolist()

    @property
    def turn_log_probs(self) -> list[float]:
        """The log-probs of `turn_tokens`."""
        return self.log_probs[self.replies[-1].stop if self.replies else 0 :].tolist()

    @property
    def segments(self) -> list[int]:
        """The values of the column `segments`: where each later context begins in the response, and its length."""
        return [number for context in self.contexts for number in (context.start, len(context))]

    @property
    def num_context_tokens(self) -> int:
        """The number of tokens of `context`."""
        if self.contexts:
            return len(self.tokens) - self.contexts[-1].start
        return len(self.prompt) + len(self.tokens)

    def context(self) -> Array:
        """Returns all tokens that the next one follows: those since the latest context began, or since the prompt.

        Before the first token it is the prompt's array itself.
        """
        if self.contexts:
            return np.asarray(self.tokens[self.contexts[-1].start :], np.int32)
        return np.concatenate([self.prompt, np.asarray(self.tokens, np.int32)]) if self.tokens else self.prompt

    def observe(self, reply: TurnReply) -> None:
        """Adds the tokens of a reply, with log-probs of 0; the reply may begin a context, and limits the next turn."""
        added = range(len(self.tokens), len(self.tokens) + len(reply.tokens))
        self.replies.append(added)
        if reply.begins_context:
            self.contexts.append(added)
        self.limits = reply.limits
        self.tokens.extend(reply.tokens)
        self.log_probs.extend([0.0] * len(added))

    def extend(self, tokens: Iterable[int], log_probs: Sequence[float]) -> None:
        """Adds sampled tokens and their log-probs; FloatingPointError if a log-prob is not finite."""
        if not all(map(isfinite, log_probs)):
            raise FloatingPointError(
                "the policy gives a sampled token no finite log-prob: its weights hold NaN or infinity"
            )
        self.tokens.extend(tokens)
        self.log_probs.extend(log_probs)


def begin_responses(rows: Batch) -> list[Response]:
    """Makes a Response for each seed of each prompt in a batch: columns `prompts`, `seeds`, perhaps `places`, images.

    With the columns `begun_responses` and `begun_log_probs` it has these tokens already; else it is empty.
    """
    seeds = rows["seeds"].values.tolist()
    places = rows["places"].values.tolist() if "places" in rows else range(len(seeds))
    row_of_each = np.repeat(np.arange(rows.num_rows), rows["seeds"].lengths).tolist()
    prompts = rows["prompts"].rows()
    images = images_of_rows(rows)
    if "begun_responses" in rows:
        prompts = _shared(prompts)
    responses = [
        Response(index, prompts[row], seed, images=images[row], row=row, place=place)
        for index, (row, seed, place) in enumerate(zip(row_of_each, seeds, places, strict=True))
    ]
    if "begun_responses" in rows:
        begun = zip(responses, rows["begun_responses"].rows(), rows["begun_log_probs"].rows(), strict=True)
        for response, tokens, log_probs in begun:
            response.extend(tokens.tolist(), log_probs.tolist())
            response.num_begun = len(tokens)
    return responses


def _shared(prompts: Sequence[Array]) -> list[Array]:
    """Returns prompts of which equal ones are the same array.

    Responses that may go on have a row each, with one seed, so that a prompt comes once for every response to it.
    """
    first_of: dict[bytes, Array] = {}
    return [first_of.setdefault(prompt.tobytes(), prompt) for prompt in prompts]


@dataclass(frozen=True)
class DecodingStep:
    """The progress after one decoding step, in which each response that is decoded gets one more token."""

    done: int  # token positions of `total`; those that an early end leaves out count as done
    total: int
    ended: Sequence[Response]  # responses that have all their tokens now
    turns: Sequence[Response] = ()  # responses that wait for a reply now, because their turn has ended in this step


class Answered(NamedTuple):
    """A response whose turn has a reply: it is over (`reply.is_last`), or goes on with it (`Response.observe`)."""

    response: Response
    reply: TurnReply


class OpenTurns(Protocol):
    """The turns of this rank's responses: how long they may be, which wait for a reply, and what follows them."""

    @property
    def any_open(self) -> bool:
        """True while responses wait for replies."""

    def max_tokens(self, response: Response) -> int:
        """Returns the number of tokens, of the whole response, at which its next turn must end."""

    def stop_texts(self, response: Response) -> Sequence[str]:
        """Returns the texts that end the next turn of a response, beside those of the run."""

    def due(self, *, is_idle: bool, while_waiting: Callable[[], None] = lambda: None) -> Sequence[Answered]:
        """Returns the responses that go on after this decoding step.

        To be called at most once after each yielded `DecodingStep`; it may wait for replies, and then calls
        `while_waiting` at least every second. `is_idle`: nothing can be decoded before a reply comes.

        Raises:
            CommandCancelled: the command was cancelled while it waited.
        """


class RolloutBackend(Protocol):
    """The interface of an engine that samples responses with the policy's weights; every rank calls every method."""

    # The step whose weights it samples with; None: none, or outdated ones. The owner of the backend may set None, too.
    policy_version: int | None
    ranks_per_engine: int  # ranks that sample the same rows; the lowest of them gets the rows

    @property
    def takes_stop_texts(self) -> bool:
        """True if turns may have texts that end them (`OpenTurns.stop_texts`): there is a tokenizer."""

    def sync_weights(self, version: int) -> None:
        """Copies the policy's weights of step `version` into the backend; called before `generate`. Collective."""

    def sleep(self) -> None:
        """Frees the engine's device memory until `sync_weights` or `generate`; called before another model runs."""

    def check_request(self, sampling: Sampling, num_tokens: int) -> None:
        """Raises ValueError if the backend cannot do this sampling, or rows of num_tokens tokens. One rank calls it."""

    def generate(
        self,
        rows: Batch,
        sampling: Sampling,
        is_cancelled: Callable[[], bool],
        open_turns: OpenTurns | None = None,
    ) -> Iterator[DecodingStep]:
        """Samples one response per seed of this rank's prompts; yields the progress after each decoding step.

        Each of `begin_responses` goes on after the tokens that it has, and is in `ended` of one step, also if it
        `is_unfinished` there. With `open_turns` it may be in `turns` of several steps before: each time it goes on once
        it is `due`, and its next tokens follow its `context`. Ranks may have different numbers of prompts, also none,
        and finish at different times. So an implementation may synchronise ranks at the beginning, but never between
        tokens. Ranks that share one engine are the exception: only the one with the rows reports which responses and
        turns have ended. The same weights, prompts, seeds, begun tokens and replies give the same responses, which end
        in the same steps; timing has no influence on what is sampled together (with replies after 0 steps: no other
        one). `is_cancelled` is called at token boundaries.

        Raises:
            CommandCancelled: `is_cancelled` returned True; the backend stays usable.
            FloatingPointError: see `Response.extend`.
        """
