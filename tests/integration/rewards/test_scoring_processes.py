"""The reward manager with real scoring processes: a reward function that fails costs its own sample only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rewards.manager import RewardManager
from rewards.samples import Failure, Sample
from rewards.source import NOT_SCORED, FailureLimit
from splitppo.config import ConfigError, RewardConfig
from tests.support.local_judge import LocalJudge, says
from tests.support.reward_function import (
    HANG_LIMIT_S,
    TROUBLE,
    config,
    failures,
    samples,
    scores,
    scoring_processes,
    write,
)

EXPECTED = "expected a number, or a dict with 'score'"

ASYNC = """
import asyncio, time

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hang":
        await asyncio.Event().wait()
    if solution_str == "block":
        while True:
            time.sleep(1)
    if solution_str == "raise":
        raise KeyError("judge")
    await asyncio.sleep(0)
    return {"score": extra_info["points"]}
"""


# Every comparison gives up.
SYMBOLIC = """
from rewards.scorers.symbolic import within_budget

@within_budget(0.0)
def compare(answer, truth):
    return answer == truth

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == "spelt alike" or compare(solution_str, ground_truth))
"""

# Takes many samples in one call; `size` stands in every result.
BATCHED = """
import asyncio, os, time

def compute_score(data_sources, solution_strs, ground_truths, extra_infos, *, good=1.0):
    if "raise" in solution_strs:
        raise RuntimeError("no batch with this one")
    if "exit" in solution_strs:
        os._exit(3)
    if "hang" in solution_strs:
        time.sleep(3600)
    if "too few" in solution_strs:
        return [good]
    points = [extra["points"] for extra in extra_infos]
    results = [{"score": good * (s == t), "size": len(points), "point": p}
               for s, t, p in zip(solution_strs, ground_truths, points)]
    return [odd.get(s, result) for s, result in zip(solution_strs, results)]

class Odd:
    def __float__(self):
        raise RuntimeError("no number")

odd = {"none": None, "huge": 10**400, "odd": Odd()}
"""


@pytest.fixture
async def trouble(tmp_path: Path) -> AsyncIterator[RewardManager]:
    async with RewardManager(config(write(tmp_path, TROUBLE)), ["mine"]) as manager:
        yield manager


@pytest.mark.parametrize("response", ["hang", "hang in native code"])
async def test_a_hanging_call_costs_its_sample_and_no_other(tmp_path: Path, response: str) -> None:
    async with RewardManager(config(write(tmp_path, TROUBLE), timeout_s=HANG_LIMIT_S), ["mine"]) as manager:
        result = await manager.score(samples(*["good"] * 9, response, *["good"] * 9))
    assert scores(result) == [1.0] * 9 + [0.0] + [1.0] * 9
    assert failures(result) == {Failure.TIMEOUT: 1}


@pytest.mark.parametrize("response", ["exit", "segfault"])
async def test_a_crashing_call_costs_its_sample_and_no_other(trouble: RewardManager, response: str) -> None:
    result = await trouble.score(samples(response, *["good"] * 5, response, "good"))
    assert scores(result) == [0.0] + [1.0] * 5 + [0.0, 1.0]
    assert failures(result) == {Failure.CRASH: 2}


async def test_raising_calls_and_results_that_are_no_score_are_counted_errors(trouble: RewardManager) -> None:
    bad = ("raise", "sys.exit", "nan", "none", "text", "dict without score", "list", "huge")
    result = await trouble.score(samples(*bad, "good"))
    assert scores(result) == [0] * 8 + [1]
    assert failures(result) == {Failure.ERROR: 8}


@pytest.mark.parametrize(
    ("response", "reason", "line"),
    [
        ("raise", "RuntimeError: no such sandbox", 'raise RuntimeError("no such sandbox")'),
        ("none", f"TypeError: the scorer returned None, {EXPECTED}", "def compute_score"),
        ("text", f"TypeError: the scorer returned '0.5', {EXPECTED}", "def compute_score"),
        ("list", f"TypeError: the scorer returned an object of type list, {EXPECTED}", "def compute_score"),
    ],
)
async def test_a_failure_of_the_users_function_names_file_and_line(
    trouble: RewardManager, tmp_path: Path, response: str, reason: str, line: str
) -> None:
    (result,) = await trouble.score(samples(response))
    number = TROUBLE[: TROUBLE.index(line)].count("\n") + 1
    assert result.message == f"{reason} ({tmp_path / 'my_reward.py'}, line {number})"


async def test_other_fields_of_a_dict_come_back(trouble: RewardManager) -> None:
    result = await trouble.score(samples("good", "dict", "kind of its own"))
    odd = {"stage": 2, "text": "x" * 10_000_000}
    assert scores(result) == [1, 2, 1]
    assert [scored.extra for scored in result] == [{}, {"acc": True, "pred": "x", "shape": "(1, 2)"}, odd]


async def test_no_samples_give_no_scores(trouble: RewardManager) -> None:
    assert await trouble.score([]) == []


async def test_async_functions_run_together_and_each_has_its_own_time_limit(tmp_path: Path) -> None:
    async with RewardManager(config(write(tmp_path, ASYNC), timeout_s=HANG_LIMIT_S), ["mine"]) as manager:
        result = await manager.score(samples("a", "hang", "b", "raise", "hang", "c"))
    assert scores(result) == [0, 0, 2, 0, 0, 5]
    assert failures(result) == {Failure.TIMEOUT: 2, Failure.ERROR: 1}


async def test_an_async_function_that_blocks_its_loop_costs_its_sample(tmp_path: Path) -> None:
    async with RewardManager(config(write(tmp_path, ASYNC), timeout_s=HANG_LIMIT_S), ["mine"]) as manager:
        result = await manager.score(samples(*"abcdef", "block", "h"))
    assert scores(result) == [0, 1, 2, 3, 4, 5, 0, 7]
    assert failures(result) == {Failure.TIMEOUT: 1}


async def test_a_batched_function_has_all_samples_in_one_call_and_its_further_arguments(tmp_path: Path) -> None:
    keys = {"custom_function_kwargs": {"good": 2.5}}
    async with RewardManager(config(write(tmp_path, BATCHED), **keys), ["mine"]) as manager:
        result = await manager.score(samples(*["good"] * 150, "none", "huge", "odd", "bad"))
    assert scores(result) == [2.5] * 150 + [0.0] * 4
    assert [scored.extra.get("point") for scored in result] == [*range(150), None, None, None, 153]
    assert {scored.extra["size"] for scored in result if scored.failure is None} == {154}
    assert failures(result) == {Failure.ERROR: 3}


@pytest.mark.parametrize(
    ("trouble", "failure"),
    [
        ("raise", Failure.ERROR),
        ("exit", Failure.CRASH),
        pytest.param("hang", Failure.TIMEOUT, marks=pytest.mark.extended),
    ],
)
async def test_a_batched_call_that_fails_costs_only_the_sample_that_fails_alone(
    tmp_path: Path, trouble: str, failure: Failure
) -> None:
    async with RewardManager(config(write(tmp_path, BATCHED), timeout_s=HANG_LIMIT_S), ["mine"]) as manager:
        result = await manager.score(samples("good", trouble, "bad", "good"))
        assert scores(await manager.score(samples("good", "too few"))) == [1, 1]
    assert scores(result) == [1, 0, 0, 1]
    assert failures(result) == {failure: 1}


@pytest.mark.parametrize(("num_others", "num_given_up"), [(1, 2), (187, 3)])
async def test_after_comparisons_that_gave_up_the_other_answers_are_compared_by_spelling(
    tmp_path: Path, num_others: int, num_given_up: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of few answers that are scored together may, and one in 64 of many."""
    async with RewardManager(config(write(tmp_path, SYMBOLIC)), ["mine"]) as manager:
        for _ in range(2):  # each time anew
            result = await manager.score(samples(*["good"] * 4, "spelt alike", *["good"] * num_others))
            num_skipped = len(result) - 1 - num_given_up
            gave_up = [scored.extra.get("symbolic") == "gave_up" for scored in result]
            assert sum(gave_up) == num_given_up
            assert scores(result) == [1.0 * (given or place == 4) for place, given in enumerate(gave_up)]
            assert sum(scored.extra.get("symbolic") == "skipped" for scored in result) == num_skipped
    what = f"{num_given_up} of {len(result)} answers could not be compared by sympy in time"
    assert caplog.messages[0] == f"{what}, and {num_skipped} after them were compared by their spelling alone"


async def test_an_async_batched_function_is_awaited(tmp_path: Path) -> None:
    text = BATCHED.replace("def compute", "async def compute").replace("points =", "await asyncio.sleep(0); points =")
    async with RewardManager(config(write(tmp_path, text)), ["mine"]) as manager:
        assert scores(await manager.score(samples("good", "bad"))) == [1, 0]


async def test_functions_and_a_judge_are_added_up_by_data_source(tmp_path: Path) -> None:
    """The first source's score is the judge's and a function's, the second's a user's function's alone."""
    terms = {"letters": [{"name": "sort_letters", "weight": 1.0}, {"name": "judge", "weight": 0.5}]}
    with LocalJudge(lambda question, _: says("Score: 8" if "abc" in question else "no idea")) as judge:
        keys = {"scorers": terms, "judge": {"url": judge.url, "model": "m"}}
        async with RewardManager(config(write(tmp_path, TROUBLE), **keys), ["letters", "mine"]) as manager:
            result = await manager.score(
                [
                    Sample("letters", "#### abcd", "abcd"),
                    *samples("good"),
                    Sample("letters", "#### x", "x"),
                    Sample("letters", "#### abc", "x"),
                ]
            )
    assert scores(result) == pytest.approx([1.4, 1.0, 1.0, 0.4])
    assert failures(result) == {Failure.UNPARSABLE: 1}
    assert result[0].extra["sort_letters_score"] == 1.0
    assert result[0].extra["judge_score"] == 0.8
    assert result[1].extra == {}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "import nothing_of_that_name",
            "key 'reward.custom_function_path': importing .* failed: ModuleNotFoundError: .*nothing_of_that_name",
        ),
        ("def compute_score(:", "key 'reward.custom_function_path': importing .* failed: SyntaxError"),
        ("raise SystemExit(3)", "key 'reward.custom_function_path': importing .* failed: SystemExit: 3"),
        ("import os; os._exit(3)", "a scoring process ended while it loaded the reward functions"),
        ("def score(x): ...", "key 'reward.custom_function_name': .* has no class or function 'compute_score'"),
        ("def compute_score(solution, truth): ...", r"must take \(data_source, solution_str, ground_truth, extra_info"),
        (
            "def compute_score(solution_strs): ...",
            r"must take \(data_sources, solution_strs, ground_truths, extra_infos",
        ),
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, good): ...",
            "key 'reward.custom_function_kwargs': .*'good'",
        ),
    ],
)
async def test_a_file_without_a_usable_function_is_a_config_error_at_start(
    tmp_path: Path, text: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        async with RewardManager(config(write(tmp_path, text)), ["mine"]):
            pass
    assert not scoring_processes()


async def test_a_further_argument_that_the_function_does_not_take_is_a_config_error_at_start(tmp_path: Path) -> None:
    sentence = (
        r"^key 'reward.custom_function_kwargs': compute_score\(data_source, solution_str, .*\) in .*my_reward.py:"
        " got an unexpected keyword argument 'god'$"
    )
    keys = {"custom_function_kwargs": {"god": 1}}
    with pytest.raises(ConfigError, match=sentence):
        async with RewardManager(config(write(tmp_path, TROUBLE), **keys), ["mine"]):
            pass


async def test_built_in_scorers_judge_each_sample_by_its_data_source() -> None:
    built_in = RewardConfig.model_validate({"num_workers": 2})
    async with RewardManager(built_in, ["openai/gsm8k", "lighteval/MATH", "sort_letters"]) as manager:
        result = await manager.score(
            [
                Sample("openai/gsm8k", "so it is\n#### 1,200", "1200"),
                Sample("lighteval/MATH", r"Thus $\boxed{\frac{2}{4}}$.", r"\frac12"),
                Sample("sort_letters", "#### abcd", "abcd"),
                Sample("sort_letters", "#### 1200", "abcd"),
            ]
        )
    assert scores(result) == [1, 1, 1, 0]
    assert not scoring_processes()


@pytest.mark.parametrize("scorers", ["custom", "custom and judge"])
async def test_once_more_have_failed_than_may_no_further_call_begins(tmp_path: Path, scorers: str) -> None:
    counted = tmp_path / "calls"
    path = write(
        tmp_path,
        f"""
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open({str(counted)!r}, "a") as file:
        file.write("called ")
    raise RuntimeError("never again")
""",
    )
    with LocalJudge(lambda _question, _number: says("Score: 5")) as judge:
        terms = [{"name": name} for name in scorers.split(" and ")]
        section = config(path, scorers={"default": terms}, judge={"url": judge.url, "model": "m"})
        limit = FailureLimit(2)
        async with RewardManager(section, ["mine"]) as manager:
            first = await manager.score(samples("a", "b"), limit=limit)
            results = await manager.score(samples(*"abcdefghijklmnopqrstuvwxyz"), limit=limit)
    assert {result.message for result in first} == {f"RuntimeError: never again ({path}, line 5)"}
    assert failures(results).total() == len(results) == 26
    num_called = sum(result.message != NOT_SCORED for result in results)
    assert 1 <= num_called <= 8
    assert len(counted.read_text().split()) == num_called + 2
