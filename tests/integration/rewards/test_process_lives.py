"""Scoring processes that are stopped, killed or interrupted, and that end with the controller."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rewards.manager import RewardManager
from rewards.process_pool import ScoringProcess
from rewards.registry import CUSTOM
from rewards.scoring_process import ScorerSetup
from splitppo.config import RewardConfig
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

# For what used to hang without limit.
LOAD_LIMIT_S = 60.0


@pytest.fixture
async def trouble(tmp_path: Path) -> AsyncIterator[RewardManager]:
    async with RewardManager(config(write(tmp_path, TROUBLE)), ["mine"]) as manager:
        yield manager


async def test_a_process_killed_between_two_batches_is_replaced(trouble: RewardManager) -> None:
    (pid,) = await trouble.score(samples("pid"))
    os.kill(int(pid.score), signal.SIGKILL)
    result = await trouble.score(samples("good", "bad", "good"))
    assert scores(result) == [1, 0, 1]


async def test_a_process_that_was_stopped_is_replaced_at_work_and_at_the_end(tmp_path: Path) -> None:
    async with RewardManager(config(write(tmp_path, TROUBLE), timeout_s=HANG_LIMIT_S), ["mine"]) as manager:
        (pid,) = await manager.score(samples("pid"))
        os.kill(int(pid.score), signal.SIGSTOP)
        async with asyncio.timeout(LOAD_LIMIT_S):
            result = await manager.score(samples("x" * 1_000_000, *["good"] * 3, "pid"))
        *scored, another = scores(result)
        assert scored == [0, 1, 1, 1]
        assert not failures(result)
        os.kill(int(another), signal.SIGSTOP)
    assert not is_running(int(pid.score))
    assert not is_running(int(another))


async def test_a_child_of_a_function_that_comes_back_answers_nobody(trouble: RewardManager) -> None:
    for _ in range(3):
        assert scores(await trouble.score(samples("fork"))) == [2]
        assert scores(await trouble.score(samples("bad"))) == [0]


async def test_what_a_function_has_started_ends_with_its_process(tmp_path: Path) -> None:
    async with RewardManager(config(write(tmp_path, TROUBLE)), ["mine"]) as manager:
        (child,) = scores(await manager.score(samples("child")))
        assert is_running(int(child))
    await asyncio.to_thread(wait_until, lambda: not is_running(int(child)))


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("import os; os._exit(4)", "ended its process with code 4"),
        ("import os; os.kill(os.getpid(), 35)", "was killed by signal 35"),
        ("import os; os.kill(os.getpid(), 9)", r"was killed by signal 9 \(SIGKILL, perhaps for want of memory\)"),
    ],
)
async def test_processes_that_end_before_each_call_end_the_run_with_a_sentence(
    tmp_path: Path, text: str, ending: str
) -> None:
    path = write(tmp_path, TROUBLE)
    async with RewardManager(config(path), ["mine"]) as manager:
        (pid,) = await manager.score(samples("pid"))
        path.write_text(text, encoding="utf-8")
        os.kill(int(pid.score), signal.SIGKILL)
        sentence = f"^3 scoring processes in a row did not begin a call; the last one {ending}$"
        with pytest.raises(ChildProcessError, match=sentence):
            await manager.score(samples("good"))
    assert not scoring_processes()


async def test_a_process_that_stops_while_it_loads_is_given_up(tmp_path: Path) -> None:
    path = write(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    process = ScoringProcess(ScorerSetup((CUSTOM,), 30.0, (path, "compute_score", {})), start_limit_s=HANG_LIMIT_S)
    with pytest.raises(TimeoutError):
        await process.load()
    assert not scoring_processes()


async def test_processes_that_are_ended_while_they_start_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    async with RewardManager(RewardConfig.model_validate({"num_workers": 24}), ["sort_letters"]):
        pass
    assert capfd.readouterr().err == ""


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


THREADS = """
import os, sys

LIBRARIES = sorted({"numpy", "torch"} & sys.modules.keys())

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    read = [os.environ.get("OMP_NUM_THREADS"), sorted(os.sched_getaffinity(0)), LIBRARIES]
    return {"score": 1, "read": str(read)}
"""


@pytest.mark.parametrize("number", ["3", None])
async def test_nothing_but_the_controllers_environment_limits_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if number is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", number)
    async with RewardManager(config(write(tmp_path, THREADS)), ["mine"]) as manager:
        (scored,) = await manager.score(samples("any"))
    assert scored.extra["read"] == str([number, sorted(os.sched_getaffinity(0)), []])
