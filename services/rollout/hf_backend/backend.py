"""Samples responses with the trained model itself: batched decoding with any Hugging Face causal LM and KV cache.

This backend needs no second copy of the weights and no second engine. Rows wait in the order of their prompts and
samples, those of responses that have tokens already before the others, the longest first. A row that has ended is
replaced by the next waiting row, or removed when no row waits. Each turn of a conversation is a row of its own, which
begins with all tokens of its context, and waits behind the others.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor, nn

from services.rollout.hf_backend.decoding import DecodedRows
from services.rollout.hf_backend.grouped_attention import grouped_attention
from services.rollout.protocol import DecodingStep, OpenTurns, Response, Sampling, begin_responses
from services.rollout.sampling import sample_tokens, uniforms
from services.rollout.stopping import StopRule, StopWatch
from services.runtime.command import CommandCancelled
from splitppo.batch import Array, Batch
from splitppo.machine.memory_limits import MAX_MASK

# Ended rows are removed or replaced once they are this share of the batch. To remove rows copies the cache of the other
# rows, to replace them is a forward of its own; both cost about as much as decoding one more token.
_ENDED_SHARE = 1 / 8
# A further turn joins after so many decoding steps at the latest: rows that end late must not keep a few turns waiting.
_MOST_WAITED = 16
# Responses that have tokens already differ much in length: they are computed in parts of about one length. Else most of
# the work is padding. Smaller parts would copy the cache more often.
_MAX_MASK_OF_BEGUN = 2**20


@dataclass(eq=False)
class HfRollout:
    """The rollout backend that samples with the policy's own Hugging Face module; see `RolloutBackend`."""

    gathered: Callable[[], AbstractContextManager[nn.Module]]  # see `PolicyWeights`
    stop_rule: StopRule
    max_batch_size: int  # rows decoded together
    device: torch.device
    policy_version: int | None = None
    ranks_per_engine: int = 1

    @property
    def takes_stop_texts(self) -> bool:
        """True if there is a tokenizer; see `RolloutBackend.takes_stop_texts`."""
        return self.stop_rule.tokenizer is not None

    def sync_weights(self, version: int) -> None:
        """Stores the version of the weights; nothing is copied, because sampling reads the policy's own weights."""
        self.policy_version = version

    def check_request(self, sampling: Sampling, num_tokens: int) -> None:
        """Accepts every request: `check_rows` has already checked the limits of the model."""

    def sleep(self) -> None:
        """Frees nothing here: this backend frees its KV cache at the end of `generate`."""

    @torch.no_grad()
    def generate(
        self,
        rows: Batch,
        sampling: Sampling,
        is_cancelled: Callable[[], bool],
        open_turns: OpenTurns | None = None,
    ) -> Iterator[DecodingStep]:
        """Samples one response per seed of this rank's prompts; see `RolloutBackend.generate`.

        Positions that are done: one for each decoded row in each step, those of a reply, and at the end of a response
        all that it has not used. A response that is full takes no reply: it has ended.
        """

        def takes_reply(response: Response) -> bool:
            return open_turns is not None and len(response.tokens) < sampling.max_response_length

        responses = sorted(begin_responses(rows), key=lambda response: -response.num_begun)
        waiting = deque(self._begin(response, sampling, open_turns) for response in responses)
        total = sum(sampling.most_tokens(response.num_begun) - response.num_begun for response in responses)
        done = 0
        ended: list[Response] = []
        with self.gathered() as model, grouped_attention(model):
            while waiting or ended or (open_turns is not None and open_turns.any_open):
                for longer in self._decode(model, waiting, sampling):
                    stopped = [row.response for row in longer if row.has_ended]
                    turns = [response for response in stopped if takes_reply(response)]
                    ended += [response for response in stopped if not takes_reply(response)]
                    unused = (sampling.most_tokens(response.num_begun) - len(response.tokens) for response in ended)
                    done += len(longer) + sum(unused)
                    if is_cancelled():
                        raise CommandCancelled
                    yield DecodingStep(done, total, ended, turns)
                    ended = []
                    if open_turns is None:
                        continue
                    is_idle = not waiting and all(row.has_ended for row in longer)
                    for response, reply in open_turns.due(is_idle=is_idle):
                        done += len(reply.tokens)
                        if reply.is_last:
                            ended.append(response)
                        else:
                            response.observe(reply)
                            waiting.append(self._begin(response, sampling, open_turns))

    def _begin(self, response: Response, sampling: Sampling, open_turns: OpenTurns | None) -> "_Row":
        """Makes the row of a response's next turn, or of the whole response."""
        rule = self.stop_rule
        context = response.context()
        if open_turns is None:
            stop = rule.begin(response.prompt, begun=response.tokens)
            most = rule.max_tokens_now(response, sampling)
            return _Row(response, context, stop, most, goes_on=most < rule.max_tokens(response.seed, sampling))
        stop = rule.begin(context, open_turns.stop_texts(response))
        return _Row(response, context, stop, open_turns.max_tokens(response))

    def _decode(self, model: nn.Module, waiting: "deque[_Row]", sampling: Sampling) -> "Iterator[list[_Row]]":
        """Decodes queued rows as a batch until all of them have ended; yields in each step the rows with a new token.

        Without queued rows there is one step without rows. At the end the queue is empty, or the model's cache cannot
        take new rows beside others.
        """
        if not waiting:
            yield []
            return

        def prefill(rows: "Sequence[_Row]") -> DecodedRows:
            is_begun = any(row.response.num_begun for row in rows)
            max_mask = _MAX_MASK_OF_BEGUN if is_begun else MAX_MASK
            contexts = [row.context for row in rows]
            images = [row.response.images for row in rows]
            return DecodedRows(model, contexts, self.device, images=images, max_mask=max_mask)

        batch = _take(waiting, self.max_batch_size)
        decoded = prefill(batch)
        while True:
            was_open = [row for row in batch if not row.has_ended]
            tokens_R = self._sample(batch, decoded.logits, sampling)
            yield was_open
            ended = [place for place, row in enumerate(batch) if row.has_ended]
            if len(ended) == len(batch):
                return
            may_join = waiting and decoded.can_join
            if not may_join and len(ended) >= len(batch) * _ENDED_SHARE:
                kept = [place for place, row in enumerate(batch) if not row.has_ended]
                decoded.keep(kept)
                batch = [batch[place] for place in kept]
                tokens_R = tokens_R[kept]
            decoded.append(tokens_R)
            new = self._joining(batch, len(ended), waiting) if may_join else []
            if new:
                places = [*ended, *range(len(batch), self.max_batch_size)][: len(new)]
                decoded.put(places, prefill(new))
                for place, row in zip(places, new, strict=True):
                    batch[place : place + 1] = [row]

    def _joining(self, batch: "Sequence[_Row]", num_ended: int, waiting: "deque[_Row]") -> "list[_Row]":
        """Takes the rows from the queue that join the batch now: none while it is better to wait for more of them.

        Rows that join take a forward pass of their prompts. This pass pays off for many rows at once (a share
        _ENDED_SHARE of the batch), for the last ones, and for a further turn that has waited _MOST_WAITED steps.
        """
        first = waiting[0]
        if first.response.replies:  # a further turn
            first.num_waited += 1
        num_new = min(len(waiting), self.max_batch_size - len(batch) + num_ended)
        are_many = max(num_ended, num_new) >= ceil(len(batch) * _ENDED_SHARE)
        are_the_last = num_ended >= len(waiting) and not waiting[-1].response.replies  # no further turn is in sight
        is_late = num_new > 0 and first.num_waited >= _MOST_WAITED
        return _take(waiting, num_new) if are_many or are_the_last or is_late else []

    def _sample(self, batch: "Sequence[_Row]", logits_RV: Tensor, sampling: Sampling) -> Tensor:
        """Samples each row's next token, and appends it to rows that have not ended; returns all tokens, [R]."""
        seeds_and_positions = [(row.response.seed, len(row.response.tokens)) for row in batch]
        numbers_R = uniforms(*zip(*seeds_and_positions, strict=True)).to(self.device)
        tokens_R, log_probs_R = sample_tokens(logits_RV, numbers_R, sampling)
        for row, token, log_prob in zip(batch, tokens_R.tolist(), log_probs_R.tolist(), strict=True):
            if not row.has_ended:
                row.response.extend((token,), (log_prob,))
                is_stopped = row.stop.ends_with(token)
                row.has_ended = is_stopped or len(row.response.tokens) == row.max_tokens
                row.response.is_unfinished = row.has_ended and not is_stopped and row.goes_on
        return tokens_R


@dataclass(eq=False)
class _Row:
    response: Response
    context: Array  # token ids before the first one that this row samples
    stop: StopWatch
    max_tokens: int  # of the whole response
    goes_on: bool = False  # with `max_tokens` the response has not ended
    has_ended: bool = False
    num_waited: int = 0  # decoding steps as the first one of the queue, if it is a further turn


def _take(waiting: deque[_Row], num_rows: int) -> list[_Row]:
    return [waiting.popleft() for _ in range(min(num_rows, len(waiting)))]
