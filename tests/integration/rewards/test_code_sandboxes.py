"""Code answers in real sandboxes: what is scored, what is contained, and what is refused where no sandbox can start."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rewards.code.bubblewrap import is_root, own_uid
from rewards.code.source import CodeSandboxes
from rewards.manager import RewardManager
from rewards.samples import Failure, Sample, Scored
from splitppo.config import CodeConfig, ConfigError, RewardConfig
from tests import hostile_code
from tests.groups import PROJECT, wait_until
from tests.hostile_code import answer

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
SQUARE = {"inputs": ["3\n", "-4\n"], "outputs": ["9", "16"]}
STRANGER = 54321  # a uid that owns nothing


async def score(*samples: tuple[str, Any], **code: Any) -> list[Scored]:
    """The results of programs and their test cases."""
    config = RewardConfig.model_validate({"code": {"num_sandboxes": 2, **code}})
    async with RewardManager(config, ["codecontests"]) as manager:
        return await manager.score([Sample("codecontests", answer(program), cases) for program, cases in samples])


def scores(results: list[Scored]) -> list[float]:
    return [scored.score for scored in results]


def guests(pid: int) -> list[str]:
    """The processes of sandboxes that process `pid` has started; an ordinary user's are not told apart."""
    uid = str(own_uid(0, pid))[:-3] if is_root() else "0"  # those of a process differ in the last three digits
    lines = subprocess.run(["ps", "-ewwo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if f'guest.py {{"uid": {uid}' in line]


@needs_bubblewrap
async def test_programs_are_scored_by_stdin_calls_and_asserts() -> None:
    call = {"inputs": ["3\n4"], "outputs": ["[3, 4]"], "fn_name": "pair"}
    results = await score(
        ("print(int(input()) ** 2)", SQUARE),
        ("import sys\nprint(int(open(0).read()) ** 2)\nsys.exit(1)", json.dumps(SQUARE)),
        ("import atexit\nx = int(input())\natexit.register(lambda: print(x * x))", SQUARE),
        ("import threading\nthreading.Thread(target=lambda: print(int(input()) ** 2)).start()", SQUARE),
        ("print(int(input()) ** 2)\nexit()", SQUARE),
        (
            "@functools.lru_cache\ndef f(n): return n and 1 + f(n - 1)\nassert f(50_000)\nprint(int(input()) ** 2)",
            SQUARE,
        ),
        ("print(9)", SQUARE),
        ("print(int(input()) ** 2)\nraise ValueError", SQUARE),
        ("def pair(a, b):\n    print('noise')\n    return a, b", call),
        ("class Solution:\n    def pair(self, a: int, b: int) -> List[int]: return [a, b]", call),
        ("def other(a, b): return a, b", call),
        ("def f(x): return x + 1", ["assert f(1) == 2", "assert f(2) == 3"]),
        ("def f(x): return 2", ["assert f(1) == 2", "assert f(2) == 3"]),
        ("import os\nos._exit(0)", {"functional": "assert f(1) == 2"}),
        ("def f(x): raise SystemExit", {"functional": "assert f(1) == 2"}),
    )
    assert scores(results) == [1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1, 0, 0, 0]
    assert all(scored.failure is None and scored.extra == {"code_limit": None} for scored in results)


@needs_bubblewrap
async def test_the_continuous_score_is_the_share_of_passed_tests_and_a_limit_costs_all_of_it() -> None:
    endless = "x = int(input())\nprint(9)\nwhile x < 0: pass"
    results = await score(("print(9)", SQUARE), (endless, SQUARE), continuous=True, timeout_s=0.5)
    assert scores(results) == [0.5, 0.0]
    assert [scored.extra for scored in results] == [
        {"code_limit": None, "acc": 0.0},
        {"code_limit": "time", "acc": 0.0},
    ]


@needs_bubblewrap
async def test_a_response_without_a_program_scores_0_and_a_row_without_test_cases_is_an_error() -> None:
    async with RewardManager(RewardConfig(), ["taco"]) as manager:
        empty, broken = await manager.score([Sample("taco", " ", SQUARE), Sample("taco", answer("x"), "{")])
    assert (empty.score, empty.failure) == (0.0, None)
    assert broken.failure is Failure.ERROR
    assert "reward_model.ground_truth: expected JSON" in broken.message


@needs_bubblewrap
async def test_a_program_sees_nothing_of_the_one_before() -> None:
    look = {"inputs": [""], "outputs": ["[]"]}
    leave = "open('/tmp/left', 'w').close()\nimport builtins\nbuiltins.left = 1\nprint([])"
    see = "import builtins, os\nprint(os.listdir('/tmp') + [x for x in dir(builtins) if x == 'left'])"
    assert scores(await score((leave, look), (see, look), (see, look), num_sandboxes=1)) == [1, 1, 1]


@needs_bubblewrap
async def test_hostile_answers_are_contained_and_counted_and_the_next_answer_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hostile_code.SECRET, "of the run")
    run = tmp_path / "run"
    run.mkdir()
    token = run / "token"
    token.write_text("secret", encoding="utf-8")
    assert await hostile_code.results([str(token), str(run)]) == hostile_code.expected()
    wait_until(lambda: not guests(os.getpid()), 5.0, "no process is left")  # one that was killed takes a moment to end
    assert [one.name for one in run.iterdir()] == ["token"]
    assert token.read_text(encoding="utf-8") == "secret"


@needs_bubblewrap
@pytest.mark.extended
@pytest.mark.skipif(not is_root(), reason="only root can become somebody else; this user's own run is the test above")
def test_hostile_answers_are_contained_where_an_ordinary_user_runs_them(tmp_path: Path) -> None:
    done = as_stranger("-m", "tests.hostile_code", str(PROJECT), environment={hostile_code.SECRET: "of the run"})
    assert done.returncode == 0, done.stderr
    results = {name: tuple(one) for name, one in json.loads(done.stdout).items()}
    assert results == hostile_code.expected()


def as_stranger(*arguments: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs Python as a user that owns nothing; with the system's, where that user does not reach this one."""
    python = os.path.realpath(sys.executable)
    if any(not folder.stat().st_mode & stat.S_IXOTH for folder in Path(python).parents):
        python = f"/usr/bin/python3.{sys.version_info.minor}"
    packages = sysconfig.get_path("purelib")
    for needed in (python, packages, PROJECT):
        if not Path(needed).exists() or any(
            not folder.stat().st_mode & stat.S_IXOTH for folder in Path(needed).parents
        ):
            pytest.skip(f"an ordinary user cannot reach {needed}")
    paths = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{PROJECT}:{packages}", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [python, *arguments],
        env={**paths, **environment},
        cwd=PROJECT,
        user=STRANGER,
        group=STRANGER,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=120,
    )


ENDLESS = """
import asyncio
from rewards.code.source import CodeSandboxes
from rewards.samples import Sample
from splitppo.config import CodeConfig

async def main():
    async with CodeSandboxes(CodeConfig(num_sandboxes=2)) as source:
        print("here", flush=True)
        row = {"inputs": [""], "outputs": [""]}
        await source.score([Sample("code", "import time\\ntime.sleep(1000)", row)])

asyncio.run(main())
"""


@needs_bubblewrap
def test_sandboxes_end_with_a_controller_that_is_killed_also_in_the_middle_of_a_program() -> None:
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, cwd=PROJECT) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == b"here\n"
        wait_until(
            lambda: len(guests(controller.pid)) >= 7
        )  # bubblewrap and guest of two that wait and of a third one, and its program
        controller.kill()
    wait_until(lambda: not guests(controller.pid))


UNSAFE = """
import asyncio, json
from rewards.code.source import CodeSandboxes
from rewards.samples import Sample
from splitppo.config import CodeConfig

async def main():
    async with CodeSandboxes(CodeConfig(unsafe=True, timeout_s=0.5, num_sandboxes=1)) as source:
        programs = ["print(int(input()) ** 2)", "while True: pass", "x = bytearray(2**34)"]
        row = {"inputs": ["3"], "outputs": ["9"]}
        scored = await source.score([Sample("apps", f"```python\\n{one}\\n```", row) for one in programs])
    print(json.dumps([(one.score, one.extra["code_limit"]) for one in scored]))

asyncio.run(main())
"""


@pytest.mark.skipif(not is_root(), reason="becomes an ordinary user")
def test_unsafe_needs_no_sandbox_keeps_the_limits_and_says_what_it_is() -> None:
    done = as_stranger("-c", UNSAFE, environment={"PATH": "/nowhere"})
    assert json.loads(done.stdout) == [[1.0, None], [0.0, "time"], [0.0, "memory"]]
    assert "reward.code.unsafe: programs of the model run WITHOUT a sandbox" in done.stderr


async def test_where_no_sandbox_can_start_code_rewards_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot be run here: bubblewrap \(bwrap\) is not.*reward\.code\.unsafe"):
        async with CodeSandboxes(CodeConfig()):
            pass
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n", encoding="utf-8")
    bwrap.chmod(0o755)
    with pytest.raises(ConfigError, match="cannot be run here: the sandbox ended: No permissions to create new name"):
        async with CodeSandboxes(CodeConfig()):
            pass


@pytest.mark.skipif(not is_root(), reason="of root alone")
async def test_root_never_runs_code_without_a_sandbox() -> None:
    with pytest.raises(ConfigError, match="root runs code only in a sandbox, under another uid"):
        async with CodeSandboxes(CodeConfig(unsafe=True)):
            pass
