"""Whole runs with scores of a judge over HTTP, which fails at times; a killed controller loses no answer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.external import ExternalGroups
from tests.support.local_judge import CLOSED, SERVER_ERROR, LocalJudge, Reply, says
from tests.support.runs import NUM_STEPS, RunFolder

pytestmark = pytest.mark.timeout(600)

Completed = Callable[[str, int], RunFolder]

TEMPLATE = "{{ response }}|{{ ground_truth }}"
# Every tenth request, one after the other.
FAILURES = (SERVER_ERROR, CLOSED, Reply("slow down", 429, {"Retry-After": "0"}), Reply("<html></html>", 502))


def mark(question: str) -> float:
    """Returns the score by the reward function of the other runs."""
    response, _, letters = question.rpartition("|")
    return sum(letter in letters for letter in response) / 16


class FlakyJudge:
    """Marks as the reward function does, fails at a tenth of its calls, and can be told to keep still.

    Attributes:
        is_still: whether it keeps the requests that come, until the caller gives up.
        num_kept: how many it has kept.
    """

    def __init__(self) -> None:
        self.is_still: Callable[[], bool] = lambda: False
        self.num_calls = self.num_kept = 0

    def __call__(self, question: str, num_asked: int) -> Reply:
        self.num_calls += 1
        if self.num_calls % 10 == 0:
            return FAILURES[self.num_calls // 10 % len(FAILURES)]
        if self.is_still():
            self.num_kept += 1
            return Reply("", 0, after_s=2.0)
        return says(f"It has some of the letters. Score: {mark(question)!r}")


@pytest.fixture
def flaky() -> FlakyJudge:
    return FlakyJudge()


@pytest.fixture
def judge(flaky: FlakyJudge) -> Iterator[LocalJudge]:
    with LocalJudge(flaky) as server:
        yield server


def overrides(judge: LocalJudge, template: Path) -> list[str]:
    """All scores are the judge's."""
    template.write_text(TEMPLATE)
    return [
        "reward.scorers={letters: [{name: judge}]}",
        f"reward.judge={{url: '{judge.url}', model: m, prompt_template: {template}, score_range: [0, 1]}}",
        "reward.judge.backoff_s=0.01",
        "reward.max_error_rate=0.0",
    ]


def num_kept_answers(folder: RunFolder) -> int:
    file = folder.path / "judge.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_a_flaky_judge_and_a_killed_controller_change_no_score_and_no_weight(
    groups: ExternalGroups, completed: Completed, judge: LocalJudge, flaky: FlakyJudge, tmp_path: Path
) -> None:
    """The undisturbed run has the same scores from a function. This one is killed while it asks for those of step 4,
    and goes on with a judge at another address.
    """
    keys, folder = overrides(judge, tmp_path / "ask.jinja"), groups.folder
    flaky.is_still = lambda: NUM_STEPS - 1 in folder.steps
    with groups.started(*keys) as first:
        first.wait_until(lambda _: flaky.num_kept > 0, "a request in the last step")
        first.process.kill()
        first.wait_nothing_is_left()
    assert folder.committed_steps == [2]
    before, kept = Counter(judge.answered), num_kept_answers(folder)
    assert 0 < kept <= len(before)
    with (folder.path / "judge.jsonl").open("ab") as torn:
        torn.write(b'{"request": "0123')

    flaky.is_still = lambda: False
    with LocalJudge(flaky) as moved:
        keys = overrides(moved, tmp_path / "ask.jinja")
        with groups.started(*keys, "run.schedule=overlap", "reward.judge.concurrency=3") as second:
            second.complete()
    assert "resumed after step 2" in second.output
    undisturbed = completed("gather", 1)
    assert folder.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
    for name in ("critic/score/mean", "critic/score/max", "critic/score/min"):
        assert [line.get(name) for line in folder.metrics] == [line.get(name) for line in undisturbed.metrics]
    # What was kept was not asked for again: step 3, which was done twice, cost its requests once.
    assert sum(question in before for question in moved.answered) <= len(before) - kept
    assert flaky.num_calls > 100
    assert "requests were sent again" in second.output + first.output
    assert re.search(r"judge\.jsonl: the last 17 bytes are no complete answer", second.output)


def sentence_about_the_first_validation(groups: ExternalGroups, *keys: str) -> str:
    """Returns the error of a run that cannot score its first validation."""
    with groups.started(*keys) as run:
        assert run.wait() == 1
    assert "Traceback" not in run.output
    assert groups.folder.summary["exit_reason"] == "failed"
    [sentence] = run.errors
    return sentence


def test_a_scorer_that_returns_text_ends_the_run_with_the_row_and_the_reason(
    groups: ExternalGroups, tmp_path: Path
) -> None:
    function = tmp_path / "text.py"
    function.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None): return '0.5'")
    sentence = sentence_about_the_first_validation(groups, f"reward.custom_function_path={function}")
    counted = r"error: (\d) of 8 responses of the validation of step 0 have no score from a scorer"
    failed, others = re.match(rf"{counted}(?: \((\d) others were not scored any more\))?, ", sentence).groups("0")
    assert int(failed) > 1  # one of eight may fail
    assert int(failed) + int(others) == 8
    assert "more than reward.max_error_rate (0.2) allows; first " in sentence
    assert "val.jsonl, line 1, data_source 'letters': TypeError: the scorer returned '0.5', expected a num" in sentence


@pytest.mark.extended
def test_a_judge_that_answers_with_a_page_ends_the_run_with_the_start_of_it(groups: ExternalGroups) -> None:
    with LocalJudge(lambda *_: Reply("<!DOCTYPE html><title>Sign in</title>")) as judge:
        keys = ("reward.scorers={letters: [{name: judge}]}", f"reward.judge={{url: '{judge.url}', model: m}}")
        sentence = sentence_about_the_first_validation(groups, *keys)
    assert "val.jsonl, line 1, data_source 'letters': the judge answered something else than a chat" in sentence
    assert sentence.endswith("'<!DOCTYPE html><title>Sign in</title>'")
