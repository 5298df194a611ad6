"""From token ids to scores: responses are decoded, without their prompts, and scored by the rewards."""

import numpy as np

from controller.data.prompts import PromptBatch
from controller.data.tokenizer import Tokenizer
from controller.rollout.results import ScoredResponses, ScoredSample
from rewards.manager import RewardManager
from rewards.samples import Sample
from splitppo.batch import Batch


class Scorer:
    """Scores the responses to a batch of prompts."""

    def __init__(self, tokenizer: Tokenizer, manager: RewardManager) -> None:
        self._tokenizer = tokenizer
        self._manager = manager

    async def score(
        self, prompts: PromptBatch, rollouts: Batch, *, num_samples: int, num_examine: int
    ) -> ScoredResponses:
        """Scores the column responses: `num_samples` neighbouring rows per prompt, in the order of the prompts.

        The first `num_examine` of each data source are logged.
        """
        responses = rollouts["responses"].rows()
        asked = prompts.take(np.repeat(np.arange(prompts.num_prompts), num_samples))
        texts = self._tokenizer.decode_batch(responses)
        samples = [
            Sample(row.data_source, response, row.ground_truth, row.extra_info, prompt)
            for row, prompt, response in zip(asked.rows, asked.texts, texts, strict=True)
        ]
        results = await self._manager.score(samples, num_examine=num_examine)
        eos = self._tokenizer.eos_token_ids
        return ScoredResponses(
            [
                ScoredSample(
                    prompt=sample.prompt,
                    response=sample.response,
                    score=float(np.float32(result.score)),
                    ground_truth=sample.ground_truth,
                    data_source=sample.data_source,
                    prompt_index=int(index),
                    has_ended=len(ids) > 0 and int(ids[-1]) in eos,
                    extra=result.extra,
                    failure=result.failure,
                )
                for index, ids, sample, result in zip(asked.row_indices, responses, samples, results, strict=True)
            ]
        )
