"""From token ids to scores: responses are decoded (the response only) and judged by the rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.data import PromptBatch
from controller.display import Sample as ShownSample
from controller.tokenizer import Tokenizer
from rewards.manager import RewardManager, Sample, ScoreResult
from splitppo.batch import Batch


@dataclass(frozen=True, eq=False)
class Verdict:
    """What the rewards say about B responses.

    Attributes:
        result: scores, extra fields, failures.
        samples: what was judged, one per response.
        ended: [B] bool, whether the response ends with an EOS token.
    """

    result: ScoreResult
    samples: Sequence[Sample]
    ended: NDArray[np.bool_]

    def as_rows(self) -> Iterator[dict[str, Any]]:
        """Every generation, as the rollout files hold it."""
        for row, sample in enumerate(self.samples):
            yield {
                "data_source": sample.data_source,
                "prompt": sample.prompt,
                "response": sample.response,
                "ground_truth": sample.ground_truth,
                "score": float(self.result.scores[row]),
                **{name: values[row] for name, values in self.result.extra.items()},
            }

    def shown(self, rows: Sequence[int]) -> list[ShownSample]:
        """Some generations, as the display takes them."""
        return [
            ShownSample(
                prompt=self.samples[row].prompt,
                response=self.samples[row].response,
                score=float(self.result.scores[row]),
                ground_truth=self.samples[row].ground_truth,
                data_source=self.samples[row].data_source,
            )
            for row in rows
        ]


def join_verdicts(verdicts: Sequence[Verdict]) -> Verdict:
    """What the rewards say about the responses of several groups, one group after the other."""
    results = [verdict.result for verdict in verdicts]
    fields = {field: None for result in results for field in result.extra}
    return Verdict(
        ScoreResult(
            scores=np.concatenate([result.scores for result in results]),
            extra={
                field: [value for result in results for value in result.extra.get(field, [None] * len(result.scores))]
                for field in fields
            },
            num_timeouts=sum(result.num_timeouts for result in results),
            num_crashes=sum(result.num_crashes for result in results),
            num_errors=sum(result.num_errors for result in results),
        ),
        [sample for verdict in verdicts for sample in verdict.samples],
        np.concatenate([verdict.ended for verdict in verdicts]),
    )


class Scorer:
    """Judges the responses to a batch of prompts."""

    def __init__(self, tokenizer: Tokenizer, manager: RewardManager) -> None:
        self._tokenizer = tokenizer
        self._manager = manager

    async def score(self, prompts: PromptBatch, rollouts: Batch, *, num_samples: int, num_examine: int) -> Verdict:
        """Scores every response.

        Args:
            prompts: the prompts, in the order of the rollouts.
            rollouts: with the column responses, `num_samples` neighbouring rows per prompt.
            num_samples: responses per prompt.
            num_examine: generations logged per data source.
        """
        responses = rollouts["responses"].rows()
        samples = [
            Sample(
                data_source=prompts.data_sources[row // num_samples],
                response=text,
                ground_truth=prompts.ground_truths[row // num_samples],
                extra_info=prompts.extra_infos[row // num_samples],
                prompt=prompts.prompt_texts[row // num_samples],
            )
            for row, text in enumerate(self._tokenizer.decode_batch(responses))
        ]
        result = await self._manager.score(samples, num_examine=num_examine)
        eos = self._tokenizer.eos_token_ids
        ended_B = np.array([len(response) > 0 and int(response[-1]) in eos for response in responses], np.bool_)
        return Verdict(result, samples, ended_B)
