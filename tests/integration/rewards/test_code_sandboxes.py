"""Code answers in real sandboxes: their scores, hostile programs, and machines where no sandbox can start."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rewards.code.bubblewrap import is_root, own_uid
from rewards.code.cases import parse_cases
from rewards.code.sandbox import Sandbox
from rewards.code.source import CodeSandboxes
from rewards.code.tree import children_of
from rewards.manager import RewardManager
from rewards.samples import Failure, Sample, Scored
from rewards.source import FailureLimit
from splitppo.config import ConfigError, RewardConfig
from splitppo.config.subsections.code import CodeConfig
from tests.support import hostile_code
from tests.support.groups import PROJECT, is_alive, wait_until
from tests.support.hostile_code import answer

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
SQUARE = {"inputs": ["3\n", "-4\n"], "outputs": ["9", "16"]}
NINE = {"inputs": [""], "outputs": ["9"]}
STRANGER = 54321  # a uid that owns nothing


async def score(*samples: tuple[str, Any], **code: Any) -> list[Scored]:
    """The results of programs and their test cases."""
    config = RewardConfig.model_validate({"code": {"num_sandboxes": 2, **code}})
    async with RewardManager(config, ["codecontests"]) as manager:
        return await manager.score([Sample("codecontests", answer(program), cases) for program, cases in samples])


def scores(results: list[Scored]) -> list[float]:
    return [scored.score for scored in results]


def guests(runners: list[int]) -> list[str]:
    """The processes of sandboxes that these have started; an ordinary user's are not told apart."""
    # Those of a process differ in the last three digits.
    uids = [str(own_uid(0, pid))[:-3] if is_root() else "0" for pid in runners]
    lines = subprocess.run(["ps", "-ewwo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if any(f'guest.py {{"uid": {uid}' in line for uid in uids)]


def runners(pid: int) -> list[int]:
    """The processes that run the code answers of controller `pid`."""
    commands = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children_of(pid)}
    return [child for child, command in commands.items() if b"rewards.code.runner" in command]


@pytest.mark.promise("sandboxes")
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
async def test_integers_of_more_than_4300_digits_are_read_printed_passed_and_returned() -> None:
    many, one_more = "9" * 5000, f"1{'0' * 5000}"
    call = {"inputs": [many], "outputs": [one_more], "fn_name": "f"}
    results = await score(
        ("print(int(input()) + 1)", {"inputs": [many], "outputs": [one_more]}),
        ("print(int(input()) + 2)", {"inputs": [many], "outputs": [one_more]}),
        ("def f(x): return x + 1", call),
        ("def f(x): return x + 2", json.dumps(call)),
        ("def f(x): return x + 1", f'{{"inputs": [[{many}]], "outputs": [{one_more}], "fn_name": "f"}}'),
    )
    assert scores(results) == [1, 0, 1, 0, 1]


@needs_bubblewrap
async def test_a_program_has_to_define_itself_what_is_called_though_contest_sites_modules_are_imported() -> None:
    call = {"inputs": ["12\n8"], "outputs": ["4"], "fn_name": "gcd"}
    asserts = ["assert gcd(12, 8) == 4"]
    results = await score(
        ("pass", call),
        ("class Solution: pass", call),
        ("pass", asserts),
        ("x = 1", asserts),
        ("from math import gcd", call),
        ("class Solution:\n    def gcd(self, a, b): return gcd(a, b)", call),
        ("def gcd(a, b): return math.gcd(a, b)", asserts),
        ("def f(x): return [x]", ["def check(g):\n    assert Counter(g(1)) == Counter([1])\ncheck(f)"]),
    )
    assert scores(results) == [0, 0, 0, 0, 1, 1, 1, 1]


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


@pytest.mark.promise("sandboxes")
@needs_bubblewrap
async def test_a_program_sees_nothing_of_the_one_before() -> None:
    look = {"inputs": [""], "outputs": ["[]"]}
    leave = "open('/tmp/left', 'w').close()\nimport builtins\nbuiltins.left = 1\nprint([])"
    see = "import builtins, os\nprint(os.listdir('/tmp') + [x for x in dir(builtins) if x == 'left'])"
    assert scores(await score((leave, look), (see, look), (see, look), num_sandboxes=1)) == [1, 1, 1]


@needs_bubblewrap
def test_a_sandbox_can_be_measured_until_it_is_ended_however_soon_its_program_ends() -> None:
    with Sandbox(CodeConfig()) as sandbox:
        assert sandbox.run("print(9)", parse_cases(NINE)).passed == (True,)
        assert sandbox.is_watched


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
    assert runners(os.getpid()) == []
    assert [entry.name for entry in run.iterdir()] == ["token"]
    assert token.read_text(encoding="utf-8") == "secret"


@needs_bubblewrap
@pytest.mark.extended
@pytest.mark.skipif(not is_root(), reason="only root can become somebody else; this user's own run is the test above")
def test_hostile_answers_are_contained_where_an_ordinary_user_runs_them(tmp_path: Path) -> None:
    done = as_stranger(
        "-m", "tests.support.hostile_code", str(PROJECT), environment={hostile_code.SECRET: "of the run"}
    )
    assert done.returncode == 0, done.stderr
    results = {name: tuple(result) for name, result in json.loads(done.stdout).items()}
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


JUDGED = """
import asyncio, json, sys
from rewards.code.source import CodeSandboxes
from rewards.samples import Sample
from rewards.source import FailureLimit
from splitppo.config.subsections.code import CodeConfig

async def main():
    row = json.dumps({"inputs": ["3"], "outputs": ["9"]})
    async with CodeSandboxes(CodeConfig(num_sandboxes=1)) as source:
        programs = ["print(int(input()) ** 2)", "print(*range(4_000_000), sep='\\\\n')"]
        scored = await source.score([Sample("apps", program, row) for program in programs], FailureLimit())
    print(json.dumps([[one.score for one in scored], [name for name in sys.modules if name.startswith("rewards.")]]))

asyncio.run(main())
"""


@needs_bubblewrap
def test_the_controllers_process_has_not_even_loaded_what_parses_and_compares() -> None:
    done = subprocess.run([sys.executable, "-c", JUDGED], capture_output=True, cwd=PROJECT, text=True, check=True)
    scored, modules = json.loads(done.stdout)
    assert scored == [1.0, 0.0]
    assert "rewards.code.source" in modules
    assert not {"rewards.code.cases", "rewards.code.frames", "rewards.code.sandbox"} & set(modules)


@needs_bubblewrap
async def test_an_answer_whose_runner_is_killed_is_scored_by_another_one() -> None:
    async with CodeSandboxes(CodeConfig(num_sandboxes=1)) as source:
        (first,) = runners(os.getpid())
        scoring = asyncio.create_task(
            source.score([Sample("apps", "import time\ntime.sleep(1)\nprint(9)", NINE)], FailureLimit())
        )
        # Bubblewrap and guest of two, and a program.
        await asyncio.to_thread(wait_until, lambda: len(guests([first])) >= 5)
        os.kill(first, signal.SIGKILL)
        assert scores(await scoring) == [1]
        assert first not in runners(os.getpid())


@needs_bubblewrap
async def test_nothing_runs_any_more_once_the_source_is_left_in_the_middle_of_an_answer() -> None:
    async with CodeSandboxes(CodeConfig(num_sandboxes=1)) as source:
        pids = runners(os.getpid())
        scoring = asyncio.create_task(
            source.score([Sample("apps", "import time\ntime.sleep(99)", NINE)], FailureLimit())
        )
        await asyncio.to_thread(wait_until, lambda: len(guests(pids)) >= 5)
    with pytest.raises(RuntimeError, match="the run is ending"):
        await scoring
    assert (runners(os.getpid()), guests(pids)) == ([], [])


@needs_bubblewrap
async def test_a_run_ends_with_the_reason_where_sandboxes_cannot_be_started_any_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bwrap, is_broken = tmp_path / "bwrap", tmp_path / "broken"
    refusal = "{ echo 'No permissions to create new namespace' >&2; exit 1; }"
    bwrap.write_text(f'#!/bin/sh\n[ -e {is_broken} ] && {refusal}\nexec {shutil.which("bwrap")} "$@"\n')
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    async with CodeSandboxes(CodeConfig(num_sandboxes=1)) as source:
        sample = Sample("apps", "print(9)", NINE)
        assert scores(await source.score([sample], FailureLimit())) == [1]
        is_broken.touch()
        with pytest.raises(RuntimeError, match="cannot be run any more: the sandbox ended: No permissions to create"):
            await source.score([sample, sample], FailureLimit())
    assert runners(os.getpid()) == []


ENDLESS = """
import asyncio
from rewards.code.source import CodeSandboxes
from rewards.samples import Sample
from rewards.source import FailureLimit
from splitppo.config.subsections.code import CodeConfig

async def main():
    async with CodeSandboxes(CodeConfig(num_sandboxes=2)) as source:
        print("here", flush=True)
        row = {"inputs": [""], "outputs": [""]}
        await source.score([Sample("code", "import time\\ntime.sleep(1000)", row)], FailureLimit())

asyncio.run(main())
"""


@needs_bubblewrap
@pytest.mark.parametrize("are_stopped", [False, True])
def test_sandboxes_end_with_a_controller_that_is_killed_also_in_the_middle_of_a_program(are_stopped: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, cwd=PROJECT) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == b"here\n"
        pids = runners(controller.pid)
        # Bubblewrap and guest of two that wait and of a third one, and its program.
        wait_until(lambda: len(guests(pids)) >= 7)
        if are_stopped:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        controller.kill()
    wait_until(lambda: not guests(pids) and not any(is_alive(pid) for pid in pids))


UNSAFE = """
import asyncio, json
from rewards.code.source import CodeSandboxes
from rewards.samples import Sample
from rewards.source import FailureLimit
from splitppo.config.subsections.code import CodeConfig

async def main():
    async with CodeSandboxes(CodeConfig(unsafe=True, timeout_s=0.5, num_sandboxes=1)) as source:
        programs = ["print(int(input()) ** 2)", "while True: pass", "x = bytearray(2**34)"]
        programs += ["import os\\nos.kill(os.getppid(), 9)"]
        programs += ["import os\\nos.write(os.open(f'/proc/{os.getppid()}/fd/1', 1), b'ok -1')"]
        row = {"inputs": ["3"], "outputs": ["9"]}
        samples = [Sample("apps", f"```python\\n{one}\\n```", row) for one in programs]
        scored = await source.score(samples, FailureLimit())
    print(json.dumps([(one.score, one.extra["code_limit"]) for one in scored]))

asyncio.run(main())
"""


@pytest.mark.skipif(not is_root(), reason="becomes an ordinary user")
def test_unsafe_needs_no_sandbox_keeps_the_limits_and_says_what_it_is() -> None:
    done = as_stranger("-c", UNSAFE, environment={"PATH": "/nowhere"})
    assert json.loads(done.stdout) == [
        [1.0, None],
        [0.0, "time"],
        [0.0, "memory"],
        [0.0, "processes"],  # it ended its sandbox
        [0.0, "processes"],
    ]
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
