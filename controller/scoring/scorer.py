"""Turns the token ids of responses into scores: decodes the responses, and calls the reward functions.

For the reward model, responses and prompts are encoded again; a service computes its scores.
"""

import asyncio
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.conversations.conversation import Conversation
from controller.data.chat_template import Messages, as_messages
from controller.data.prompt_files import PromptRow
from controller.data.prompts import PromptBatch
from controller.data.reward_rows import RewardTokenizer, as_answer
from controller.data.token_spans import TokenSpans
from controller.data.tokenizer import Tokenizer
from controller.ppo.scores import Scores, Text, objects
from rewards.manager import RewardManager
from rewards.samples import Sample, Scored
from rewards.source import NOT_SCORED, FailureLimit
from splitppo.batch import Batch, Column


class ScoringFailed(Exception):
    """Reward functions failed for too many responses; the message is one sentence."""


@dataclass(eq=False)
class Scorer:
    """Decodes the responses to a batch of prompts, and scores them by the reward functions.

    Attributes:
        tokenizer: decodes the responses.
        manager: calls the reward functions.
        reward_tokenizer: encodes the rows of the reward model; None if there is no reward model.
        stop: the texts that end a response.
    """

    tokenizer: Tokenizer
    manager: RewardManager
    reward_tokenizer: RewardTokenizer | None = None
    stop: Sequence[str] = ()

    @property
    def data_sources(self) -> Set[str]:
        """The data sources that reward functions score."""
        return self.manager.data_sources

    @property
    def max_reward_length(self) -> int | None:
        """The longest row, in tokens, that the reward model reads; None without a limit or a reward model."""
        return None if self.reward_tokenizer is None else self.reward_tokenizer.max_length

    async def reward_rows(
        self, prompts: PromptBatch, rollouts: Batch, conversations: Sequence[Conversation] = ()
    ) -> Batch:
        """Encodes prompts and responses as the column reward_tokens for the reward model; one prompt per response."""
        assert self.reward_tokenizer is not None
        rows = prompts.rows
        if conversations:
            scored = [self._scored_turns(row, talk) for row, talk in zip(rows, conversations, strict=True)]
            rows = tuple(row for row, _ in scored)
            said = tuple(messages for _, messages in scored)
        else:
            said = tuple(as_answer(text) for text in self.tokenizer.decode_batch(rollouts["responses"].rows()))
        return await asyncio.to_thread(self.reward_tokenizer.encode, rows, said)

    def _scored_turns(self, row: PromptRow, talk: Conversation) -> tuple[PromptRow, Messages]:
        """Returns the prompt and the messages of a conversation that the reward model reads: those of its last context.

        What an environment said in the place of the prompt is among the messages.
        """
        assert self.reward_tokenizer is not None
        context = talk.last_context
        reads_last_turn = self.reward_tokenizer.conversation == "last_turn"
        following = talk.messages if context is None else context.following
        said = as_answer(talk.last_turn) if reads_last_turn else following
        if context is None:
            return row, said
        no_prompt = replace(row, prompt="" if isinstance(row.prompt, str) else [], observation="")
        return no_prompt, [*context.beginning, *said]

    def samples(
        self, prompts: PromptBatch, rollouts: Batch, conversations: Sequence[Conversation] = ()
    ) -> list[Sample]:
        """Decodes the responses of a batch to what their scorers get; `prompts` has one prompt per response.

        `extra_info` has the fields of the row and `ended_by`, "stop" or "length"; in a conversation the fields of
        `Conversation.facts`.
        """
        responses = rollouts["responses"].rows()
        texts = self.tokenizer.decode_batch(responses)
        talks: Sequence[Conversation | None] = conversations or [None] * len(texts)
        rows = zip(prompts.rows, prompts.texts, responses, texts, talks, strict=True)
        return [
            Sample(
                data_source=row.data_source,
                response=text,
                ground_truth=row.ground_truth,
                extra_info={
                    **row.extra_info,
                    **({"ended_by": self._ended_by(ids, text)} if talk is None else talk.facts),
                },
                prompt=prompt,
                messages=_before_response(row, talk),
                last_turn=text if talk is None else talk.last_turn,
                last_context=self._last_context(ids, talk),
                token_spans=TokenSpans(self.tokenizer, ids, text),
            )
            for row, prompt, ids, text, talk in rows
        ]

    def _last_context(self, ids: NDArray[Any], talk: Conversation | None) -> str | None:
        """Returns what a response says in its last context; None if it has one."""
        begin = 0 if talk is None else talk.last_beginning[0]
        return self.tokenizer.decode(ids[begin:].tolist()) if begin else None

    def _has_eos(self, ids: NDArray[Any]) -> bool:
        return len(ids) > 0 and int(ids[-1]) in self.tokenizer.eos_token_ids

    def _has_stopped(self, text: str) -> bool:
        return any(stop in text for stop in self.stop)

    def _ended_by(self, ids: NDArray[Any], text: str) -> str:
        return "stop" if self._has_eos(ids) or self._has_stopped(text) else "length"

    async def score(
        self,
        prompts: PromptBatch,
        rollouts: Batch,
        conversations: Sequence[Conversation] = (),
        *,
        num_examine: int,
        asks_functions: bool = True,
        limit: FailureLimit | None = None,
    ) -> Scores:
        """Scores each response of a batch by its reward function, as `Scores`; `prompts` has one prompt per response.

        `conversations` has the conversation of each response, if there are any: the rewards of the environment are
        added.

        The first `num_examine` responses of each data source are logged. For a data source without a reward function
        the score is 0, and only the reward model's score is added to it later; without `asks_functions` that is all.
        `limit` is that of all responses that `check_failures` will check together.
        """
        responses = rollouts["responses"].rows()
        samples = self.samples(prompts, rollouts, conversations)
        talks: Sequence[Conversation | None] = conversations or [None] * len(samples)
        asked = self.manager.data_sources if asks_functions else ()
        has_scorer_B = np.array([row.data_source in asked for row in prompts.rows], np.bool_)
        asked_samples = list(compress(samples, has_scorer_B))
        scored = iter(await self.manager.score(asked_samples, num_examine=num_examine, limit=limit))
        results = [next(scored) if has_scorer else Scored(0.0) for has_scorer in has_scorer_B]
        if conversations:
            results = [
                talk.added_to(result, len(ids))
                for talk, result, ids in zip(conversations, results, responses, strict=True)
            ]
        scores_B = np.array([result.total for result in results], np.float32)
        token_scores = Column.from_rows([result.token_scores for result in results], np.dtype(np.float32))
        return Scores(
            scores_B,
            rule_scores=np.where(has_scorer_B | bool(conversations), scores_B, np.float32(np.nan)),
            model_scores=None,
            token_scores=token_scores,
            rule_token_scores=token_scores,
            has_eos=np.array(list(map(self._has_eos, responses)), np.bool_),
            has_stopped=np.array([self._has_stopped(sample.response) for sample in samples], np.bool_),
            is_truncated=np.array([talk is not None and talk.is_truncated for talk in talks], np.bool_),
            data_sources=objects(row.data_source for row in prompts.rows),
            prompt_indices=prompts.row_indices,
            places=objects(row.place for row in prompts.rows),
            failures=objects(result.failure for result in results),
            messages=objects(result.message for result in results),
            extra=objects(result.extra for result in results),
            conversations=objects(talks),
            texts=objects(Text(sample.prompt, sample.response, sample.ground_truth) for sample in samples),
        )


def _before_response(row: PromptRow, talk: Conversation | None) -> Messages:
    """Returns the messages before what is scored: the prompt, or those by which the last context began."""
    context = None if talk is None else talk.last_context
    return as_messages(row.begun_prompt) if context is None else context.beginning


def check_failures(scores: Scores, max_error_rate: float, whose: str) -> None:
    """Checks that reward functions failed for at most this share of responses; `whose` names these, e.g. "step 3".

    Raises:
        ScoringFailed: reward functions failed for more responses.
    """
    failed = np.flatnonzero([failure is not None for failure in scores.failures])
    if len(failed) > max_error_rate * scores.num_rows:
        asked = [row for row in failed if scores.messages[row] != NOT_SCORED]
        row = asked[0]
        what = f"{len(asked)} of {scores.num_rows} responses of {whose} have no score from a scorer"
        if num_others := len(failed) - len(asked):
            what += f" ({num_others} others were not scored any more)"
        first = f"{scores.places[row]}, data_source {scores.data_sources[row]!r}: {scores.messages[row]}"
        raise ScoringFailed(f"{what}, more than reward.max_error_rate ({max_error_rate:g}) allows; first {first}")
