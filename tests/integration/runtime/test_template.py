"""Ranks that are forked from a template differ in nothing from ranks that were started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from splitppo.machine.children.forks import Forked
from splitppo.machine.children.tree import is_stopped
from tests.support.groups import PROJECT, is_alive, template, wait_until

PROBE = "tests.integration.runtime.probe"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What three forked ranks have found."""
    folder = tmp_path_factory.mktemp("ranks")
    request = {
        "arguments": ["--nproc-per-node", "3", "-m", PROBE, str(folder), "--lifeline"],
        "environment": {},
        "report_file": str(folder / "end.json"),
    }
    reading, lifeline = os.pipe()
    with (folder / "output").open("wb") as output:
        torchrun = template(os.getpid()).fork(request, reading, output.fileno())
    os.close(reading)
    assert torchrun.wait(120) == 0, (folder / "output").read_text()
    os.close(lifeline)
    assert (folder / "output").read_text() == ""
    assert not (folder / "end.json").exists()
    return [{**json.loads((folder / f"rank_{n}.json").read_text()), "torchrun": torchrun.pid} for n in range(3)]


def test_ranks_are_children_of_their_torchrun_with_sessions_of_their_own(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["parent"] == rank["torchrun"] and rank["is_session_leader"] for rank in ranks)


def test_the_title_of_a_rank_says_which_one_it_is(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        assert rank["command"].startswith(f"{PROBE} rank {number} of 3: ")
        assert rank["arguments"][1:] == ["--lifeline"]


def test_ranks_take_signals_as_any_new_process(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["signals"] for rank in ranks)


def test_a_rank_has_open_its_standard_streams_and_what_torchrun_reads(ranks: list[dict[str, Any]]) -> None:
    assert [len(rank["descriptors"]) for rank in ranks] == [4, 4, 4]
    assert all(rank["descriptors"][:3] == [0, 1, 2] for rank in ranks)


def test_ranks_draw_different_random_numbers_where_nobody_has_set_a_seed(ranks: list[dict[str, Any]]) -> None:
    for draws in zip(*(rank["random"] for rank in ranks), strict=True):
        assert len({*draws}) == 3
    assert len({rank["torch_seed"] for rank in ranks}) == 1  # torch's own default


def test_ranks_compute_in_threads_and_with_each_other(ranks: list[dict[str, Any]]) -> None:
    assert [rank["sum"] for rank in ranks] == [3.0, 3.0, 3.0]


def test_ranks_have_the_environment_of_a_program_that_was_started_with_it(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["kept_memory"] == str(1 << 40)
        assert rank["only_at_import"] == []
        assert not rank["cuda"]


def test_what_ranks_are_forked_from_has_one_thread_and_has_opened_nothing() -> None:
    look = """
        import os, psutil
        from services.runtime.group.rank_imports import import_for_ranks, module_of_ranks
        import_for_ranks(module_of_ranks(f"services.{role}") for role in ("actor", "critic", "reward", "rollout"))
        import torch
        print(len(os.listdir("/proc/self/task")), len(psutil.Process().net_connections()), torch.cuda.is_initialized())
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    command = [sys.executable, "-c", textwrap.dedent(look)]
    seen = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=True).stdout
    assert seen.split() == ["1", "0", "False"]


def start_two(folder: Path) -> Forked:
    """Starts a group whose two ranks wait; returns its torchrun."""
    request = {
        "arguments": ["--nproc-per-node", "2", "-m", "tests.integration.runtime.slow_start", str(folder)],
        "environment": {},
        "report_file": str(folder / "end.json"),
    }
    with (folder / "output").open("wb") as output, Path(os.devnull).open() as nothing:
        torchrun = template(os.getpid()).fork(request, nothing.fileno(), output.fileno())
    for rank in range(2):
        wait_until(lambda rank=rank: (folder / f"pid_{rank}").exists(), 120, f"rank {rank}")
    return torchrun


def read_end(folder: Path) -> tuple[int, str, int]:
    """Returns which rank torchrun says was first to end, how, and its exit code."""
    end = json.loads((folder / "end.json").read_text())
    assert (end["refusal"], end["is_oom_kill"]) == ("", False)
    return end["rank"], end["how"], end["exit_code"]


def test_a_group_is_over_when_a_rank_is_killed_that_has_not_begun(tmp_path: Path) -> None:
    """The other rank waits for it, and torchrun ends that one."""
    torchrun = start_two(tmp_path)
    os.kill(int((tmp_path / "pid_1").read_text()), 9)
    assert torchrun.wait(60) == 128 + 9
    assert read_end(tmp_path) == (1, "was ended by SIGKILL", -9)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_torchrun_ends_is_not_the_one_that_failed(tmp_path: Path, rank: int) -> None:
    torchrun = start_two(tmp_path)
    (tmp_path / f"fail_{rank}").touch()
    assert torchrun.wait(60) == 1
    assert read_end(tmp_path) == (rank, "ended with exit code 1", 1)


def test_a_group_ends_with_its_launcher_though_a_rank_was_stopped_at_once(tmp_path: Path) -> None:
    run = f"""
        import os, signal, sys
        from services.runtime.group.torchrun import run_torchrun
        os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGSTOP))
        program = ("-m", "tests.integration.runtime.slow_start", {str(tmp_path)!r})
        sys.exit(run_torchrun(["--nproc-per-node", "1", *program, "--lifeline"], forks=True))
    """
    command = [sys.executable, "-c", textwrap.dedent(run)]
    torchrun = subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE, start_new_session=True)
    ranks = wait_until(lambda: psutil.Process(torchrun.pid).children(), 120, "a rank")
    wait_until(lambda: is_stopped(ranks[0].pid), what="a stopped rank")
    assert torchrun.stdin is not None
    torchrun.stdin.close()
    assert torchrun.wait(60) == 3
    assert not is_alive(ranks[0].pid)


@pytest.mark.parametrize("flag", ["--redirects", "--tee"])
def test_what_a_rank_prints_goes_where_torchruns_flags_say(tmp_path: Path, flag: str) -> None:
    logs, own_end = tmp_path / "logs", ("-m", "tests.integration.runtime.slow_start", str(tmp_path))
    for rank in range(2):
        (tmp_path / f"fail_{rank}").touch()
    request = {
        "arguments": ["--nproc-per-node", "2", flag, "3", "--log-dir", str(logs), *own_end],
        "environment": {},
        "report_file": None,
    }
    with (tmp_path / "output").open("wb") as output, Path(os.devnull).open() as nothing:
        assert template(os.getpid()).fork(request, nothing.fileno(), output.fileno()).wait(60) == 1
    for rank in range(2):
        for stream in ("stdout", "stderr"):
            (log,) = logs.glob(f"*/attempt_0/{rank}/{stream}.log")
            assert log.read_text() == f"{stream} of rank {rank}\n"
    shown = (tmp_path / "output").read_text()
    assert ("stdout of rank" in shown) is (flag == "--tee")


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        ("os.fork = refuse", "Resource temporarily unavailable"),
        ("threading.Thread.start = refuse_thread", "can't start new thread"),
    ],
)
def test_a_machine_that_gives_no_process_or_thread_is_said_in_one_sentence(
    tmp_path: Path, missing: str, why: str
) -> None:
    run = f"""
        import os, sys, threading
        from services.runtime.group.torchrun import run_torchrun

        def refuse(*_):
            raise BlockingIOError(11, "Resource temporarily unavailable")

        def refuse_thread(*_):
            raise RuntimeError("can't start new thread")

        {missing}
        program = ("-m", "tests.integration.runtime.slow_start", {str(tmp_path)!r})
        sys.exit(run_torchrun(["--nproc-per-node", "1", *program, "--lifeline"], forks=True))
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(run)], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    (sentence,) = ended.stderr.splitlines()
    assert sentence.startswith("error: cannot start the processes and threads of the group: ")
    assert why in sentence
