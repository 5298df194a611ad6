"""The reward manager with real scoring processes: what a bad reward function costs, and what it never costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from multiprocessing import active_children
from pathlib import Path

import pytest

from rewards.manager import RewardManager
from rewards.samples import Failure, Sample, Scored
from splitppo.config import ConfigError, RewardConfig

# One user's file with every kind of trouble, chosen by the response.
TROUBLE = """
import os, re, signal, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if "marker" in extra_info:
        open(extra_info["marker"], "w").close()
    if solution_str == "hang":
        while True:
            time.sleep(1)
    if solution_str == "hang in native code":
        re.match(r"(a+)+$", "a" * 64 + "b")
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if solution_str == "raise":
        raise RuntimeError("no such sandbox")
    if solution_str == "sys.exit":
        sys.exit("bye")
    if solution_str == "nan":
        return float("nan")
    if solution_str == "none":
        return None
    if solution_str == "dict":
        return {"score": 2, "acc": True, "pred": "x", "shape": (1, 2)}
    if solution_str == "dict without score":
        return {"acc": 1.0}
    if solution_str == "pid":
        return os.getpid()
    return float(solution_str == ground_truth)
"""

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


def samples(*responses: str) -> list[Sample]:
    return [Sample("mine", response, "good", {"points": index}) for index, response in enumerate(responses)]


def scores(result: list[Scored]) -> list[float]:
    return [scored.score for scored in result]


def failures(result: list[Scored]) -> Counter[Failure]:
    return Counter(scored.failure for scored in result if scored.failure)


def config(path: Path, **keys: object) -> RewardConfig:
    return RewardConfig.model_validate({"custom_function_path": path, "timeout_s": 60.0, "num_workers": 1, **keys})


def write(folder: Path, text: str) -> Path:
    path = folder / "my_reward.py"
    path.write_text(text, encoding="utf-8")
    return path


# For what hangs: long enough for a good call on a busy machine.
HANG_LIMIT_S = 2.0


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
    result = await trouble.score(samples("raise", "sys.exit", "nan", "none", "dict without score", "good"))
    assert scores(result) == [0, 0, 0, 0, 0, 1]
    assert failures(result) == {Failure.ERROR: 5}


async def test_other_fields_of_a_dict_come_back(trouble: RewardManager) -> None:
    result = await trouble.score(samples("good", "dict"))
    assert scores(result) == [1, 2]
    assert [scored.extra for scored in result] == [{}, {"acc": True, "pred": "x", "shape": "(1, 2)"}]


async def test_no_samples_give_no_scores(trouble: RewardManager) -> None:
    assert await trouble.score([]) == []


async def test_a_process_killed_between_two_batches_is_replaced(trouble: RewardManager) -> None:
    (pid,) = await trouble.score(samples("pid"))
    os.kill(int(pid.score), signal.SIGKILL)
    result = await trouble.score(samples("good", "bad", "good"))
    assert scores(result) == [1, 0, 1]


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


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import nothing_of_that_name", "importing the reward file .* failed: ModuleNotFoundError: No module named"),
        ("def compute_score(:", "importing the reward file .* failed: SyntaxError"),
        ("raise SystemExit(3)", "importing the reward file .* failed: SystemExit: 3"),
        ("import os; os._exit(3)", "a scoring process ended while it loaded the reward functions"),
        ("def score(x): ...", "has no function 'compute_score'"),
        ("def compute_score(solution, truth): ...", r"must take \(data_source, solution_str, ground_truth, extra_info"),
    ],
)
async def test_a_file_without_a_usable_function_is_a_config_error_at_start(
    tmp_path: Path, text: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        async with RewardManager(config(write(tmp_path, text)), ["mine"]):
            pass
    assert not active_children()


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
    assert not active_children()


# A controller in small: starts scoring processes, prints a process id, then ends in its own way.
CONTROLLER = """
import asyncio, os, signal, sys
from rewards.manager import RewardManager
from rewards.samples import Failure, Sample, Scored
from splitppo.config import RewardConfig

async def main():
    manager = RewardManager(RewardConfig.model_validate({"custom_function_path": sys.argv[1]}), ["mine"])
    await manager.__aenter__()
    (pid,) = await manager.score([Sample("mine", "pid", "", {})])
    marker = sys.argv[1] + ".started"
    busy = asyncio.create_task(manager.score([Sample("mine", sys.argv[2], "", {"marker": marker})]))
    while not os.path.exists(marker):
        await asyncio.sleep(0.01)
    print(int(pid.score), flush=True)
    ending = sys.argv[3]
    if ending == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "sys.exit":
        sys.exit(0)
    if ending == "group interrupt":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.killpg(0, signal.SIGINT)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        (same,) = await manager.score([Sample("mine", "pid", "", {})])
        print(int(same.score), flush=True)
        await manager.__aexit__()

if __name__ == "__main__":
    asyncio.run(main())
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.02)


def run_controller(tmp_path: Path, busy_with: str, ending: str) -> list[int]:
    script = tmp_path / "small_controller.py"
    script.write_text(CONTROLLER, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script, write(tmp_path, TROUBLE), busy_with, ending],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        start_new_session=True,
        timeout=60,
        check=False,
    )
    return [int(line) for line in done.stdout.split()]


@pytest.mark.parametrize(
    ("busy_with", "ending"),
    [("hang in native code", "SIGKILL"), ("good", "sys.exit")],
)
def test_scoring_processes_end_with_their_controller(tmp_path: Path, busy_with: str, ending: str) -> None:
    (pid,) = run_controller(tmp_path, busy_with, ending)
    wait_until(lambda: not is_running(pid))


def test_an_interrupt_of_the_process_group_leaves_scoring_processes_at_work(tmp_path: Path) -> None:
    before, after = run_controller(tmp_path, "good", "group interrupt")
    assert before == after
