"""The recipe guess_number, by its command: a short run, and whole runs that must learn to bisect."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from tests.support.groups import PROJECT
from tests.support.recipes import trained
from tests.support.runs import RunFolder

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

NUM_STEPS = 4
ANY = "evaluation.min_accuracy=0"
GUESS = re.compile(r'\{"name": "guess", "arguments": \{"number": (\d+)\}\}')


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The first steps of the recipe."""
    overrides = (f"run.total_steps={NUM_STEPS}", ANY, "tracking.dump_rollouts=true")
    return trained("guess_number", tmp_path_factory.mktemp("short") / "run", *overrides)


def test_more_numbers_are_found_after_a_few_steps(short: RunFolder) -> None:
    validation = short.summary["validation"]
    assert validation["after"]["overall"] >= validation["before"]["overall"] + 0.2


def test_conversations_have_several_turns_and_keep_their_limits(short: RunFolder) -> None:
    for step in short.metrics[1:]:
        assert 3 < step["num_turns/mean"] <= step["num_turns/max"] == 5
        assert step["tool_call_counts/max"] <= 5
        assert step["response_length/sampled/max"] < step["response_length/max"] <= 64
        assert (step["environment/num_lost"], step["environment/num_timeouts"]) == (0, 0)


def test_the_report_shows_when_environments_worked(short: RunFolder) -> None:
    assert {span["name"] for span in short.spans() if span["pool"] == "environments"} == {"environment"}
    assert (short.path / "report.png").is_file()


def test_the_reward_is_that_of_the_last_guess(short: RunFolder) -> None:
    rows = [json.loads(line) for line in (short.path / f"rollouts/train/{NUM_STEPS}.jsonl").read_text().splitlines()]
    found = [(GUESS.findall(row["response"]) or [""])[-1] == row["ground_truth"] for row in rows]
    assert [row["score"] for row in rows] == [float(is_found) for is_found in found]
    assert 0 < sum(found) < len(rows)


def test_the_model_of_a_run_plays_and_the_run_folder_stays_as_it_is(short: RunFolder) -> None:
    def files() -> list[tuple[Path, int]]:
        return [(file, file.stat().st_mtime_ns) for file in sorted(short.path.rglob("*")) if file.is_file()]

    before = files()
    command = [sys.executable, "-m", "controller", "play", "--config", str(short.path / "config.yaml"), "--model"]
    done = subprocess.run(command, cwd=PROJECT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"\nthe model: the checkpoint of step {NUM_STEPS}\n" in done.stdout
    assert files() == before


def test_the_agent_program_ends_with_the_same_weights(short: RunFolder, tmp_path: Path) -> None:
    agent = "rollout.multi_turn.environments={default: {agent: recipes/guess_number/agent.py:run}}"
    again = trained("guess_number", tmp_path / "run", agent, f"run.total_steps={NUM_STEPS}", ANY)
    assert again.summary["weights_sha256"] == short.summary["weights_sha256"]


def test_the_median_of_three_seeds_finds_at_least_85_of_100_numbers(tmp_path: Path) -> None:
    runs = [trained("guess_number", tmp_path / str(seed), f"run.seed={seed}", ANY) for seed in (1, 2, 3)]
    accuracies = [run.summary["validation"]["after"]["overall"] for run in runs]
    assert median(accuracies) >= 0.85, accuracies
    assert [run.summary["global_step"] for run in runs] == [20] * 3
