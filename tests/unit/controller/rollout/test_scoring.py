"""What is judged: decoded responses only, each with its own prompt's truth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from controller.data.tokenizer import Tokenizer
from controller.rollout.results import ScoredResponses, ScoredSample, ScoringFailed
from controller.rollout.scoring import Scorer
from controller.tracking.step_file import json_line
from controller.tracking.step_metrics import reward_model_metrics
from rewards.samples import Failure, Sample, Scored
from splitppo.batch import Batch
from splitppo.config import ConfigError
from splitppo.config.reward import OverlongBuffer
from tests.fake_services import make_table

EOS, EOS_TOO = 3, 4
# Prompt 0 is answered by "ab" and "a<eos>", prompt 1 by "" and "b<eos2>".
RESPONSES = [[1, 2], [1, EOS], [], [2, EOS_TOO]]


class LengthReward:
    """Scores a response by its letters; remembers what it was asked."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.num_examine = -1
        self.extras: list[dict[str, float]] = [{}, {"acc": 0.5}, {"acc": 1.0}, {}]
        self.data_sources = frozenset({"a", "b"})

    async def score(self, samples: Sequence[Sample], *, num_examine: int = 0) -> list[Scored]:
        self.samples, self.num_examine = list(samples), num_examine
        return [Scored(len(sample.response), extra) for sample, extra in zip(samples, self.extras, strict=True)]


class NoReward(LengthReward):
    """A scorer that fails at everything."""

    async def score(self, samples: Sequence[Sample], *, num_examine: int = 0) -> list[Scored]:
        return [Scored(0.0, failure=Failure.ERROR, message="TypeError: no") for _ in samples]


@pytest.fixture
def tokenizer() -> Tokenizer:
    backend = Backend(models.WordLevel({"?": 0, "a": 1, "b": 2, "<eos>": EOS, "<eos2>": EOS_TOO}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<eos>", "<eos2>"])
    return Tokenizer(backend, (EOS, EOS_TOO))


async def judge(tokenizer: Tokenizer, reward: LengthReward, *, num_examine: int = 0) -> ScoredResponses:
    prompts = make_table().take(np.array([0, 0, 1, 1]))
    rollouts = Batch.from_rows(responses=RESPONSES)
    scorer = Scorer(tokenizer, reward)  # type: ignore[arg-type]
    return await scorer.score(prompts, rollouts, num_examine=num_examine)


async def test_the_reward_sees_the_response_without_prompt_and_special_tokens(tokenizer: Tokenizer) -> None:
    reward = LengthReward()
    scored = await judge(tokenizer, reward)
    assert [sample.response for sample in reward.samples] == ["ab", "a", "", "b"]
    assert scored.scores.tolist() == [2, 1, 0, 1]


async def test_every_response_is_judged_by_its_own_prompts_row(tokenizer: Tokenizer) -> None:
    reward = LengthReward()
    await judge(tokenizer, reward, num_examine=3)
    rows = [(s.data_source, s.ground_truth, s.extra_info, s.prompt, s.messages[0]["content"]) for s in reward.samples]
    of_first = ("a", "truth 0", {"row": 0}, "prompt 0", "prompt 0")
    of_second = ("b", "truth 1", {"row": 1}, "prompt 1", "prompt 1")
    assert rows == [of_first, of_first, of_second, of_second]
    assert reward.num_examine == 3


async def test_a_response_without_a_score_says_why_and_where_its_row_stands(tokenizer: Tokenizer) -> None:
    scored = await judge(tokenizer, NoReward())
    assert [(one.score, one.rule_score, one.failure) for one in scored.samples] == [(0.0, 0.0, Failure.ERROR)] * 4
    assert {one.message for one in scored.samples} == {"TypeError: no"}
    assert scored.samples[2].place == make_table().rows[1].place


async def test_any_eos_token_ends_a_response_and_an_empty_one_has_not_ended(tokenizer: Tokenizer) -> None:
    scored = await judge(tokenizer, LengthReward())
    assert scored.ended.tolist() == [False, True, False, True]


async def test_rows_for_the_rollout_files_hold_scores_and_extra_fields(tokenizer: Tokenizer) -> None:
    scored = await judge(tokenizer, LengthReward())
    rows = list(scored.as_rows())
    assert rows[1] == {
        "data_source": "a",
        "prompt": "prompt 0",
        "response": "a",
        "ground_truth": "truth 0",
        "score": 1.0,
        "acc": 0.5,
    }
    assert [row["acc"] for row in rows] == [None, 0.5, 1.0, None]


class PlacingReward(LengthReward):
    """Half of every score is on the tokens, but for a response without any."""

    async def score(self, samples: Sequence[Sample], *, num_examine: int = 0) -> list[Scored]:
        self.samples, self.num_examine = list(samples), num_examine
        return [
            Scored(0.5 * len(sample.response), token_scores=[0.5 * (end - start) for start, end in sample.token_spans])
            for sample in samples
        ]


async def test_a_score_is_the_sum_of_its_parts_wherever_they_are_placed(tokenizer: Tokenizer) -> None:
    scored = await judge(tokenizer, PlacingReward())
    assert scored.scores.tolist() == [2, 1, 0, 1]
    placed = scored.token_scores(np.array([2, 2, 0, 2], np.int32))
    assert placed is not None
    assert [row.tolist() for row in placed.rows()] == [[0.5, 0.5], [0.5, 0.0], [], [0.5, 0.0]]
    rows = [json.loads(json_line(row)) for row in scored.as_rows()]
    assert [(row["score"], row["token_scores"]) for row in rows[:3]] == [(2, [0.5, 0.5]), (1, [0.5, 0]), (0, None)]


async def test_scores_without_places_have_no_column_of_them(tokenizer: Tokenizer) -> None:
    scored = await judge(tokenizer, LengthReward())
    assert scored.token_scores(np.array([2, 2, 0, 2], np.int32)) is None


async def test_a_source_without_a_function_is_not_judged_and_keeps_its_place(tokenizer: Tokenizer) -> None:
    reward = LengthReward()
    reward.data_sources = frozenset("a")
    prompts, rollouts = make_table().take(np.array([1, 1, 0, 0])), Batch.from_rows(responses=RESPONSES)
    reward.extras = [{}, {}]
    scored = await Scorer(tokenizer, reward).score(prompts, rollouts, num_examine=0)  # type: ignore[arg-type]
    assert [sample.data_source for sample in reward.samples] == ["a", "a"]
    assert [(sample.data_source, sample.score) for sample in scored.samples] == [("b", 0), ("b", 0), ("a", 0), ("a", 1)]


def responses(*scores: float, **fields: Any) -> ScoredResponses:
    return ScoredResponses([ScoredSample("p", f"answer {score}", score, "t", "letters", **fields) for score in scores])


def test_responses_of_parts_are_joined_in_their_order() -> None:
    joined = ScoredResponses.join(
        [
            responses(1.0, extra={"acc": 0.5}),
            responses(2.0, has_ended=False),
            responses(3.0, extra={"format": 1.0}, failure=Failure.CRASH),
        ]
    )
    assert joined.scores.tolist() == [1.0, 2.0, 3.0]
    assert joined.scores.dtype == np.float32
    assert joined.ended.tolist() == [True, False, True]
    assert joined.extra == {"acc": [0.5, None, None], "format": [None, None, 1.0]}
    assert joined.failures == {Failure.CRASH: 1}
    assert [row["response"] for row in joined.as_rows()] == ["answer 1.0", "answer 2.0", "answer 3.0"]


def test_components_are_numeric_fields_and_0_where_a_response_has_none() -> None:
    scored = ScoredResponses.join(
        [responses(1.0, extra={"right": True, "why": "yes"}), responses(2.0, 3.0), responses(4.0, extra={"right": 0.5})]
    )
    parts_KB = scored.components(["right", "score"])
    assert parts_KB is not None
    assert parts_KB.tolist() == [[1.0, 0.0, 0.0, 0.5], [1.0, 2.0, 3.0, 4.0]]
    assert parts_KB.dtype == np.float32
    assert scored.components([]) is None
    with pytest.raises(
        ConfigError, match=r"'algorithm.gdpo_reward_keys': no response has the field 'rigth'; known: sc"
    ):
        scored.components(["rigth"])
    with pytest.raises(ConfigError, match=r"expected a finite number in the field 'why', got 'yes' for .* 'letters'"):
        scored.components(["why"])
    with pytest.raises(ConfigError, match=r"expected a finite number in the field 'right', got nan"):
        responses(1.0, extra={"right": float("nan")}).components(["right"])


def test_rule_and_model_are_added_with_the_weight_of_the_data_source() -> None:
    samples = [
        replace(one, data_source=source, rule_score=one.score if source == "a" else None)
        for one, source in zip(responses(1.0, 2.0, 0.0).samples, "aab", strict=True)
    ]
    coefs = {"a": 0.5, "b": 2.0}
    assert reward_model_metrics(samples) == {}
    combined = ScoredResponses(samples).with_model_scores(np.array([-1.0, 0.25, 3.0], np.float32), coefs.__getitem__)
    assert combined.scores.tolist() == [0.5, 2.125, 6.0]
    assert [(one.rule_score, one.model_score) for one in combined.samples] == [(1.0, -1.0), (2.0, 0.25), (None, 3.0)]
    assert [(row["rule_score"], row["model_score"]) for row in combined.as_rows()][2] == (None, 3.0)
    assert reward_model_metrics(combined.samples) == {
        "reward/rule/mean": 1.5,
        "reward/rule/max": 2.0,
        "reward/rule/min": 1.0,
        "reward/model/mean": 0.75,
        "reward/model/max": 3.0,
        "reward/model/min": -1.0,
    }


def test_long_responses_lose_score_and_the_rule_score_stays() -> None:
    buffer = OverlongBuffer.model_validate({"enable": True, "len": 4, "penalty_factor": 2.0})
    punished = responses(1.0, 2.0, rule_score=1.0).with_overlong_penalty(buffer, np.array([8, 9]), 12)
    assert punished.scores.tolist() == [1.0, 1.5]
    assert punished.extra == {"overlong_reward": [0.0, -0.5], "overlong": [False, True]}
    assert [one.rule_score for one in punished.samples] == [1.0, 1.0]
    silent = buffer.model_copy(update={"log": False})
    assert responses(1.0).with_overlong_penalty(silent, np.array([12]), 12).samples[0].extra == {}
    assert responses(1.0).with_overlong_penalty(OverlongBuffer(), np.array([12]), 12).scores.tolist() == [1.0]


@pytest.mark.parametrize(
    ("length", "has_ended", "text", "is_truncated"),
    [
        (8, False, "and so", True),
        (8, True, "and so", False),  # an EOS token was the last that was allowed
        (7, False, "and so", False),  # something else has ended it
        (8, False, "so\n\n", False),  # a stop text was completed by the last token
        (0, False, "", False),
    ],
)
def test_a_response_was_cut_off_if_nothing_but_its_length_has_ended_it(
    length: int, has_ended: bool, text: str, is_truncated: bool
) -> None:
    [sample] = responses(1.0).samples
    scored = ScoredResponses([replace(sample, has_ended=has_ended, response=text)])
    assert scored.truncated.tolist() == [False]
    assert scored.with_truncation(np.array([length]), 8, ["\n\n"]).truncated.tolist() == [is_truncated]


def test_more_failures_than_allowed_end_the_run_with_the_first_ones_row_and_reason() -> None:
    failed = {"failure": Failure.ERROR, "message": "KeyError: 'x'", "place": "train.jsonl, line 7"}
    scored = ScoredResponses.join([responses(1.0, 2.0, 3.0), responses(0.0, **failed)])
    scored.check_failures(0.25, "step 3")
    with pytest.raises(ScoringFailed) as ended:
        scored.check_failures(0.2, "step 3")
    assert str(ended.value) == (
        "1 of 4 responses of step 3 have no score from a scorer, more than reward.max_error_rate (0.2) allows;"
        " first train.jsonl, line 7, data_source 'letters': KeyError: 'x'"
    )
    responses(0.0, **failed).check_failures(1.0, "step 3")
    responses().check_failures(0.0, "step 3")


def test_a_score_of_the_model_that_is_not_finite_ends_the_run() -> None:
    scores = np.array([0.0, np.nan], np.float32)
    with pytest.raises(ConfigError, match=r"^reward_model\.model: expected finite scores, got nan for response 1$"):
        responses(1.0, 2.0).with_model_scores(scores, lambda _: 1.0)


def test_what_the_experience_takes_is_all_of_the_same_responses() -> None:
    scored = responses(1.0, extra={"right": 0.5}, has_ended=False).with_truncation(np.array([8]), 8, [])
    greedy = np.array([0.25], np.float32)
    scores = scored.as_scores(np.array([8], np.int32), ["right"], greedy)
    assert scores.components is not None
    assert scores.truncated is not None
    assert (scores.responses.tolist(), scores.components.tolist()) == ([1.0], [[0.5]])
    assert scores.truncated.tolist() == [True]
    assert scores.tokens is None
    assert scores.greedy is greedy
