"""What is judged: decoded responses only, each with its own prompt's truth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from controller.scoring import Scorer, Verdict, join_verdicts
from controller.tokenizer import Tokenizer
from rewards.manager import Sample, ScoreResult
from splitppo.batch import Batch
from tests.fake_services import make_table

EOS, EOS_TOO = 3, 4
# Prompt 0 is answered by "ab" and "a<eos>", prompt 1 by "" and "b<eos2>".
RESPONSES = [[1, 2], [1, EOS], [], [2, EOS_TOO]]


class LengthReward:
    """Scores a response by its letters; remembers what it was asked."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.num_examine = -1

    async def score(self, samples: Sequence[Sample], *, num_examine: int = 0) -> ScoreResult:
        self.samples, self.num_examine = list(samples), num_examine
        lengths = [len(sample.response) for sample in samples]
        extra = {"acc": [None, 0.5, 1.0, None]}
        return ScoreResult(np.array(lengths, np.float32), extra, num_timeouts=1, num_crashes=0, num_errors=2)


@pytest.fixture
def tokenizer() -> Tokenizer:
    backend = Backend(models.WordLevel({"?": 0, "a": 1, "b": 2, "<eos>": EOS, "<eos2>": EOS_TOO}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<eos>", "<eos2>"])
    return Tokenizer(backend, {"eos_token": "<eos>"}, (EOS, EOS_TOO), None)


async def judge(tokenizer: Tokenizer, reward: LengthReward, *, num_examine: int = 0) -> Verdict:
    prompts = make_table().take(np.array([0, 1]))
    rollouts = prompts.repeated(2).merge(Batch.from_rows(responses=RESPONSES))
    scorer = Scorer(tokenizer, reward)  # type: ignore[arg-type]
    return await scorer.score(prompts, rollouts, num_samples=2, num_examine=num_examine)


async def test_the_reward_sees_the_response_without_prompt_and_special_tokens(tokenizer: Tokenizer) -> None:
    reward = LengthReward()
    verdict = await judge(tokenizer, reward)
    assert [sample.response for sample in reward.samples] == ["ab", "a", "", "b"]
    assert verdict.result.scores.tolist() == [2, 1, 0, 1]


async def test_every_response_is_judged_by_its_own_prompts_row(tokenizer: Tokenizer) -> None:
    reward = LengthReward()
    await judge(tokenizer, reward, num_examine=3)
    rows = [(s.data_source, s.ground_truth, s.extra_info, s.prompt) for s in reward.samples]
    of_first, of_second = ("a", "truth 0", {"row": 0}, "prompt 0"), ("b", "truth 1", {"row": 1}, "prompt 1")
    assert rows == [of_first, of_first, of_second, of_second]
    assert reward.num_examine == 3


async def test_any_eos_token_ends_a_response_and_an_empty_one_has_not_ended(tokenizer: Tokenizer) -> None:
    verdict = await judge(tokenizer, LengthReward())
    assert verdict.ended.tolist() == [False, True, False, True]


async def test_rows_for_the_rollout_files_hold_scores_and_extra_fields(tokenizer: Tokenizer) -> None:
    verdict = await judge(tokenizer, LengthReward())
    rows = list(verdict.as_rows())
    assert rows[1] == {
        "data_source": "a",
        "prompt": "prompt 0",
        "response": "a",
        "ground_truth": "truth 0",
        "score": 1.0,
        "acc": 0.5,
    }
    assert [row["acc"] for row in rows] == [None, 0.5, 1.0, None]


async def test_shown_samples_are_the_ones_asked_for(tokenizer: Tokenizer) -> None:
    verdict = await judge(tokenizer, LengthReward())
    shown = verdict.shown([3, 0])
    assert [(sample.prompt, sample.response, sample.score) for sample in shown] == [
        ("prompt 1", "b", 1.0),
        ("prompt 0", "ab", 2.0),
    ]


def verdict_of(scores: list[float], **extra: list[float | None]) -> Verdict:
    samples = [Sample("letters", f"answer {score}", "truth") for score in scores]
    result = ScoreResult(np.array(scores, np.float32), extra, num_timeouts=1, num_crashes=2, num_errors=3)
    return Verdict(result, samples, np.array([score > 1 for score in scores]))


def test_verdicts_of_groups_are_joined_in_their_order() -> None:
    joined = join_verdicts([verdict_of([1.0, 2.0], acc=[0.5, None]), verdict_of([3.0], format=[1.0])])
    assert joined.result.scores.tolist() == [1.0, 2.0, 3.0]
    assert joined.result.scores.dtype == np.float32
    assert joined.result.extra == {"acc": [0.5, None, None], "format": [None, None, 1.0]}
    assert (joined.result.num_timeouts, joined.result.num_crashes, joined.result.num_errors) == (2, 4, 6)
    assert [sample.response for sample in joined.samples] == ["answer 1.0", "answer 2.0", "answer 3.0"]
    assert joined.ended.tolist() == [False, True, True]


def test_one_verdict_is_joined_to_itself() -> None:
    one = verdict_of([1.0, 2.0], acc=[0.5, None])
    assert list(join_verdicts([one]).as_rows()) == list(one.as_rows())
