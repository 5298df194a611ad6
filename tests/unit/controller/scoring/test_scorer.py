"""The samples that are scored: decoded responses only, each with the truth of its own prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from controller.conversations.conversation import Conversation
from controller.data.reward_rows import RewardTokenizer
from controller.data.tokenizer import Tokenizer
from controller.ppo.scores import Scores, objects
from controller.scoring.scorer import Scorer, ScoringFailed, check_failures
from controller.tracking.rollout_dump import rollout_rows
from rewards.samples import Failure, Sample, Scored
from rewards.source import NOT_SCORED, FailureLimit
from splitppo.batch import Batch
from splitppo.run_folder.append_log import json_line
from tests.support.fake_services import make_table
from tests.support.scores import make_scores

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

    async def score(
        self, samples: Sequence[Sample], *, num_examine: int = 0, limit: FailureLimit | None = None
    ) -> list[Scored]:
        self.samples, self.num_examine = list(samples), num_examine
        return [Scored(len(sample.response), extra) for sample, extra in zip(samples, self.extras, strict=True)]


class NoReward(LengthReward):
    """A scorer that fails at everything."""

    async def score(
        self, samples: Sequence[Sample], *, num_examine: int = 0, limit: FailureLimit | None = None
    ) -> list[Scored]:
        return [Scored(0.0, failure=Failure.ERROR, message="TypeError: no") for _ in samples]


@pytest.fixture
def tokenizer() -> Tokenizer:
    backend = Backend(models.WordLevel({"?": 0, "a": 1, "b": 2, "<eos>": EOS, "<eos2>": EOS_TOO}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<eos>", "<eos2>"])
    return Tokenizer(backend, (EOS, EOS_TOO))


async def judge(tokenizer: Tokenizer, reward: LengthReward, *, num_examine: int = 0) -> Scores:
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
    first, second = {"row": 0, "ended_by": "length"}, {"row": 1, "ended_by": "stop"}
    assert rows == [
        ("a", "truth 0", first, "prompt 0", "prompt 0"),
        ("a", "truth 0", {**first, "ended_by": "stop"}, "prompt 0", "prompt 0"),
        ("b", "truth 1", {**second, "ended_by": "length"}, "prompt 1", "prompt 1"),
        ("b", "truth 1", second, "prompt 1", "prompt 1"),
    ]
    assert make_table().rows[0].extra_info == {"row": 0}
    assert reward.num_examine == 3


async def test_a_scorer_that_may_not_ask_functions_asks_none(tokenizer: Tokenizer) -> None:
    prompts, reward = make_table().take(np.array([0, 0, 1, 1])), LengthReward()
    reward.extras = []
    scorer = Scorer(tokenizer, reward)  # type: ignore[arg-type]
    scored = await scorer.score(prompts, Batch.from_rows(responses=RESPONSES), num_examine=0, asks_functions=False)
    assert reward.samples == []
    assert scored.scores.tolist() == [0.0] * 4
    assert np.isnan(scored.rule_scores).all()
    assert scored.has_eos.tolist() == [False, True, False, True]


async def test_a_response_without_a_score_says_why_and_where_its_row_stands(tokenizer: Tokenizer) -> None:
    scored = await judge(tokenizer, NoReward())
    assert (scored.scores.tolist(), scored.rule_scores.tolist()) == ([0.0] * 4, [0.0] * 4)
    assert set(scored.failures) == {Failure.ERROR}
    assert set(scored.messages) == {"TypeError: no"}
    assert scored.places[2] == make_table().rows[1].place


async def test_any_eos_token_ends_a_response_and_an_empty_one_has_not_ended(tokenizer: Tokenizer) -> None:
    scored = await judge(tokenizer, LengthReward())
    assert scored.has_eos.tolist() == [False, True, False, True]


async def test_a_stop_text_ends_a_response_and_other_text_does_not(tokenizer: Tokenizer) -> None:
    prompts, rollouts = make_table().take(np.array([0, 0, 1, 1])), Batch.from_rows(responses=RESPONSES)
    scorer = Scorer(tokenizer, LengthReward(), stop=["ab", "c"])  # type: ignore[arg-type]
    scored = await scorer.score(prompts, rollouts, num_examine=0)
    assert scored.has_stopped.tolist() == [True, False, False, False]
    assert not (await judge(tokenizer, LengthReward())).has_stopped.any()


async def test_rows_for_the_rollout_files_hold_scores_and_extra_fields(tokenizer: Tokenizer) -> None:
    scored = await judge(tokenizer, LengthReward())
    rows = list(rollout_rows(scored))
    assert rows[1] == {
        "data_source": "a",
        "prompt": "prompt 0",
        "response": "a",
        "ground_truth": "truth 0",
        "score": 1.0,
        "acc": 0.5,
    }
    assert [row["acc"] for row in rows] == [None, 0.5, 1.0, None]


async def test_a_conversation_is_scored_whole_or_its_last_turn_alone(tokenizer: Tokenizer) -> None:
    said = [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "<eos>"},
        {"role": "assistant", "content": "b"},
    ]
    prompts, rollouts = make_table().take(np.array([0, 1])), Batch.from_rows(responses=[[1, 2], [2]])
    talks, reward = [Conversation(messages=said, last_turn="b"), Conversation(lost="it broke")], LengthReward()
    reward.extras = [{}, {}]
    tokens: dict[str, list[list[int]]] = {}
    for part in ("all", "last_turn"):
        scorer = Scorer(tokenizer, reward, RewardTokenizer(tokenizer, None, part))  # type: ignore[arg-type]
        rows = await scorer.reward_rows(prompts, rollouts, talks)
        tokens[part] = [row.tolist() for row in rows["reward_tokens"].rows()]
    asked = [tokenizer.backend.encode(str(row.prompt)).ids for row in prompts.rows]
    # "<eos>" has letters that this tokenizer does not know.
    assert tokens["all"] == [[*asked[0], 1, *tokenizer.backend.encode("?" * 5).ids, 2], asked[1]]
    assert tokens["last_turn"] == [[*asked[0], 2], asked[1]]
    await scorer.score(prompts, rollouts, talks, num_examine=0)
    assert [sample.last_turn for sample in reward.samples] == ["b", ""]
    assert [sample.extra_info["ended_by"] for sample in reward.samples] == ["environment"] * 2
    await scorer.score(prompts, rollouts, num_examine=0)
    assert [sample.last_turn for sample in reward.samples] == ["ab", "b"]


async def test_of_several_contexts_reward_model_and_judge_read_the_last_one(tokenizer: Tokenizer) -> None:
    beginning = (
        {"role": "user", "content": "<eos>", "begins_context": True},
        {"role": "assistant", "content": "b"},
    )
    turn = {"role": "assistant", "content": "a"}
    talks = [
        Conversation(messages=(turn, *beginning, turn), last_turn="a", last_beginning=(3, 3)),
        Conversation(messages=(turn,), last_turn="a", own_prompt=({"role": "user", "content": "<eos>b"},)),
    ]
    reward = LengthReward()
    reward.extras = [{}, {}]
    prompts, rollouts = make_table().take(np.array([0, 1])), Batch.from_rows(responses=[[1, 0, 2, 1], [1]])
    spelt = tokenizer.backend.encode("?" * 5).ids  # its letters are none that this tokenizer knows
    for part, read in {"all": [*spelt, 2, 1], "last_turn": [*spelt, 2, 1]}.items():
        scorer = Scorer(tokenizer, reward, RewardTokenizer(tokenizer, None, part))  # type: ignore[arg-type]
        rows = await scorer.reward_rows(prompts, rollouts, talks)
        assert [row.tolist() for row in rows["reward_tokens"].rows()] == [read, [*spelt, 2, 1]]
    await scorer.score(prompts, rollouts, talks, num_examine=0)
    assert [(sample.response, sample.last_context) for sample in reward.samples] == [("a?ba", "a"), ("a", None)]
    assert [[message["content"] for message in sample.messages] for sample in reward.samples] == [
        ["<eos>", "b"],
        ["<eos>b"],
    ]
    assert [len(sample.extra_info["messages"]) for sample in reward.samples] == [4, 1]


class PlacingReward(LengthReward):
    """Half of every score is on the tokens, but for a response without any."""

    async def score(
        self, samples: Sequence[Sample], *, num_examine: int = 0, limit: FailureLimit | None = None
    ) -> list[Scored]:
        self.samples, self.num_examine = list(samples), num_examine
        return [
            Scored(0.5 * len(sample.response), token_scores=[0.5 * (end - start) for start, end in sample.token_spans])
            for sample in samples
        ]


async def test_a_score_is_the_sum_of_its_parts_wherever_they_are_placed(tokenizer: Tokenizer) -> None:
    scored = await judge(tokenizer, PlacingReward())
    assert scored.scores.tolist() == [2, 1, 0, 1]
    assert [row.tolist() for row in scored.token_scores.rows()] == [[0.5, 0.5], [0.5, 0.0], [], [0.5, 0.0]]
    rows = [json.loads(json_line(row)) for row in rollout_rows(scored)]
    assert [(row["score"], row["token_scores"]) for row in rows[:3]] == [(2, [0.5, 0.5]), (1, [0.5, 0]), (0, None)]


async def test_scores_without_places_have_empty_rows_of_them(tokenizer: Tokenizer) -> None:
    scored = await judge(tokenizer, LengthReward())
    assert scored.token_scores.lengths.tolist() == [0, 0, 0, 0]
    assert "token_scores" not in next(rollout_rows(scored))


async def test_a_source_without_a_function_is_not_judged_and_keeps_its_place(tokenizer: Tokenizer) -> None:
    reward = LengthReward()
    reward.data_sources = frozenset("a")
    prompts, rollouts = make_table().take(np.array([1, 1, 0, 0])), Batch.from_rows(responses=RESPONSES)
    reward.extras = [{}, {}]
    scored = await Scorer(tokenizer, reward).score(prompts, rollouts, num_examine=0)  # type: ignore[arg-type]
    assert [sample.data_source for sample in reward.samples] == ["a", "a"]
    assert list(zip(scored.data_sources, scored.scores, strict=True)) == [("b", 0), ("b", 0), ("a", 0), ("a", 1)]
    assert np.isnan(scored.rule_scores).tolist() == [True, True, False, False]


def test_more_failures_than_allowed_end_the_run_with_the_first_ones_row_and_reason() -> None:
    columns = {
        "failures": objects([None, None, None, Failure.ERROR]),
        "messages": objects(["", "", "", "KeyError: 'x'"]),
        "places": objects(["", "", "", "train.jsonl, line 7"]),
        "data_sources": objects(["letters"] * 4),
    }
    scored = make_scores(np.array([1.0, 2.0, 3.0, 0.0], np.float32), **columns)
    check_failures(scored, 0.25, "step 3")
    with pytest.raises(ScoringFailed) as ended:
        check_failures(scored, 0.2, "step 3")
    assert str(ended.value) == (
        "1 of 4 responses of step 3 have no score from a scorer, more than reward.max_error_rate (0.2) allows;"
        " first train.jsonl, line 7, data_source 'letters': KeyError: 'x'"
    )
    check_failures(scored.take(np.array([3])), 1.0, "step 3")
    not_called = replace(scored, failures=objects([Failure.UNAVAILABLE] * 2 + [None, Failure.ERROR]))
    not_called = replace(not_called, messages=objects([NOT_SCORED] * 2 + ["", "KeyError: 'x'"]))
    with pytest.raises(ScoringFailed, match=r"^1 of 4 .*\(2 others were not scored any more\), more.*, line 7, "):
        check_failures(not_called, 0.2, "step 3")
    check_failures(make_scores(np.empty(0, np.float32)), 0.0, "step 3")
