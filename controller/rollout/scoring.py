"""From token ids to scores: responses are decoded, without their prompts, and scored by the rewards.

For the reward model, responses and prompts are encoded anew; a service computes its scores.
"""

import asyncio
from itertools import compress
from typing import Any

import numpy as np

from controller.data.chat_template import as_messages
from controller.data.prompts import PromptBatch
from controller.data.reward_rows import RewardTokenizer
from controller.data.token_spans import TokenSpans
from controller.data.tokenizer import Tokenizer
from controller.rollout.results import ScoredResponses, ScoredSample
from rewards.manager import RewardManager
from rewards.samples import Sample, Scored
from splitppo.batch import Batch


class Scorer:
    """Scores the responses to a batch of prompts; `reward_tokenizer` where there is a reward model."""

    def __init__(
        self, tokenizer: Tokenizer, manager: RewardManager, reward_tokenizer: RewardTokenizer | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._manager = manager
        self._reward_tokenizer = reward_tokenizer

    @property
    def scored_sources(self) -> frozenset[str]:
        """The data sources that have a reward function."""
        return self._manager.data_sources

    @property
    def max_reward_length(self) -> int | None:
        """Tokens of the longest row that the reward model reads; None: no limit, or no reward model."""
        return None if self._reward_tokenizer is None else self._reward_tokenizer.max_length

    async def reward_rows(self, prompts: PromptBatch, rollouts: Batch) -> Batch:
        """What the reward model reads: the column reward_tokens, a row per response; `prompts` has one for each."""
        assert self._reward_tokenizer is not None
        texts = self._tokenizer.decode_batch(rollouts["responses"].rows())
        asked = [row.prompt for row in prompts.rows]
        return await asyncio.to_thread(self._reward_tokenizer.encode, asked, texts)

    async def score(self, prompts: PromptBatch, rollouts: Batch, *, num_examine: int) -> ScoredResponses:
        """Scores the column responses; `prompts` has one for each.

        The first `num_examine` of each data source are logged. Where a data source has no reward function the score is
        0: the reward model has the say.
        """
        responses = rollouts["responses"].rows()
        texts = self._tokenizer.decode_batch(responses)
        samples = [
            Sample(
                *(row.data_source, response, row.ground_truth, row.extra_info),
                prompt=prompt,
                messages=as_messages(row.prompt),
                token_spans=TokenSpans(self._tokenizer, ids, response),
            )
            for row, prompt, ids, response in zip(prompts.rows, prompts.texts, responses, texts, strict=True)
        ]
        is_judged = [row.data_source in self.scored_sources for row in prompts.rows]
        judged = list(compress(samples, is_judged))
        scored = iter(await self._manager.score(judged, num_examine=num_examine))
        results = [next(scored) if judges else None for judges in is_judged]
        return ScoredResponses(
            [
                ScoredSample(
                    prompt=sample.prompt,
                    response=sample.response,
                    ground_truth=sample.ground_truth,
                    data_source=sample.data_source,
                    prompt_index=int(index),
                    has_ended=len(ids) > 0 and int(ids[-1]) in self._tokenizer.eos_token_ids,
                    place=row.place,
                    **_fields_of(result),
                )
                for index, row, ids, sample, result in zip(
                    prompts.row_indices, prompts.rows, responses, samples, results, strict=True
                )
            ]
        )


def _fields_of(result: Scored | None) -> dict[str, Any]:
    """What the scorers say about a response, if its data source has any."""
    if result is None:
        return {"score": 0.0}
    score = float(np.float32(result.total))
    return {
        "score": score,
        "rule_score": score,
        "extra": result.extra,
        "failure": result.failure,
        "message": result.message,
        "token_scores": np.array(result.token_scores, np.float32) if result.token_scores else None,
    }
