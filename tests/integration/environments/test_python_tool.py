"""The tool `python`: programs of the model run in sandboxes, and nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from rewards.code.bubblewrap import is_root, own_uid
from rewards.code.tree import children_of
from splitppo.config import ConfigError
from splitppo.config.subsections.code import CodeConfig
from tests.support import hostile_code
from tests.support.groups import PROJECT, wait_until
from tests.support.user_tools import TOOLS, call, contents, processes, reply, started, write

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
PYTHON = {"p": {"tools": ["python"]}}


def python(code: str) -> str:
    return call("python", code=code)


def of_user(uid: str) -> list[str]:
    """Returns the processes of sandboxes whose users begin with `uid`."""
    lines = subprocess.run(["ps", "-ewwo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if f'guest.py {{"uid": {uid}' in line]


def environment_processes(controller: int) -> list[int]:
    """Returns the processes that are forked from a child of the controller's."""
    return [forked for template in children_of(controller) for forked in children_of(template)]


def guests(controller: int) -> list[str]:
    """Returns the processes of sandboxes of a controller's environment processes."""
    return [line for process in environment_processes(controller) for line in of_user(user_of(process))]


def user_of(pid: int) -> str:
    """Returns the first digits of the users of sandboxes that a process starts; an ordinary user's are all alike."""
    return str(own_uid(0, pid))[:-3] if is_root() else "0"


@needs_bubblewrap
async def test_the_reply_is_what_a_program_prints_and_how_it_ends() -> None:
    async with processes(PYTHON, code=CodeConfig(timeout_s=0.5)) as pool:
        assert [tool["function"]["name"] for tool in pool.schemas_of("p")] == ["python"]
        episode = await started(pool, "p")
        programs = {
            "print(6 * 7)": "42\n",
            "import sys\nprint('a')\nprint('b', file=sys.stderr)\nprint({1: '{}'})": "a\nb\n{1: '{}'}\n",
            "x = 1": "[the program printed nothing]",
            "def f():\n    return x\nf()": "Traceback (most recent call last):\n"
            '  File "program.py", line 3, in <module>\n    f()*line 2, in f\n    return x\n*NameError: *\n',
            "x = (": '  File "program.py", line 1\n    x = (\n        ^\nSyntaxError: *\n',
            "print('a')\nexit(3)": "a\n[[]exit code 3]\n",
            "print('a')\nexit(0)": "a\n",
            "raise SystemExit('bye')": "bye\n",
            "raise KeyboardInterrupt": "Traceback (most recent call last):\n*\nKeyboardInterrupt\n",
            "import os, sys\nprint('a', flush=True)\nos.write(2, b'b')\nprint(sys.getrecursionlimit())": "a\nb1000\n",
            "import os\nos.abort()": "[the program printed nothing]\n[it ended with an error]",
            "while True: pass": "[the program was ended: it exceeded the limit of time]",
            "print('x' * 300_000)": "[the program was ended: it exceeded the limit of output]",
            "print('\\udcff')": "*",
            "": "[the program printed nothing]",
        }
        for program, expected in programs.items():
            [text] = await reply(episode, python(program))
            assert text == expected or fnmatchcase(text, expected), program
        bad = await episode.say(call("python", program="print()"), "stop")
        assert (bad.num_bad_calls, bad.num_tool_errors) == (1, 0)


@needs_bubblewrap
@pytest.mark.extended
async def test_hostile_programs_are_contained_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hostile_code.SECRET, "of the run")
    (token := tmp_path / "token").write_text("secret")
    limits = CodeConfig.model_validate({**hostile_code.CODE, "timeout_s": 0.5})
    async with processes(PYTHON, code=limits, timeout_s=60.0) as pool:

        async def run(name: str, program: str) -> str:
            given = f"import io, sys\nsys.stdin = io.StringIO({str(token)!r})\n{program}"
            [text] = await reply(await started(pool, "p"), python(given))
            assert "49" not in text.split(), name
            return text

        async with asyncio.TaskGroup() as tasks:
            texts = {
                name: tasks.create_task(run(name, program)) for name, (_, program) in hostile_code.PROGRAMS.items()
            }
        assert len(texts) > 20
        ended = {name: task.result() for name, task in texts.items()}
        stopped = {name for name, text in ended.items() if text.startswith("[the program was ended")}
        assert stopped >= {"sleep", "a busy loop", "busy loops", "1 GB of output", "many files", "a daemon"}
        assert await reply(await started(pool, "p"), python("print(7 * 7)")) == ["49\n"]
        await asyncio.to_thread(wait_until, lambda: not guests(os.getpid()))
    assert token.read_text() == "secret"


@needs_bubblewrap
@pytest.mark.extended
async def test_programs_wait_for_a_sandbox_and_hold_up_no_other_conversation(tmp_path: Path) -> None:
    environments = {**PYTHON, "t": {"tools": [f"{write(tmp_path, TOOLS)}:lookup"]}}
    async with processes(environments, code=CodeConfig(num_sandboxes=1, timeout_s=10.0), timeout_s=3.0) as pool:
        sleepers = [
            asyncio.create_task(reply(await started(pool, "p"), python("import time\ntime.sleep(1.2)\nprint(1)")))
            for _ in range(4)
        ]
        assert await reply(await started(pool, "t"), call("lookup", key="a")) == ["the value of a"]
        assert not any(task.done() for task in sleepers)
        assert await asyncio.gather(*sleepers) == [["1\n"]] * 4  # the last one after more than timeout_s


@needs_bubblewrap
@pytest.mark.extended
async def test_a_program_that_takes_longer_than_a_call_may_is_ended() -> None:
    async with processes(PYTHON, timeout_s=1.0) as pool:
        late = await (await started(pool, "p")).say(python("import time\ntime.sleep(99)"), "stop")
        assert (contents(late), late.num_timeouts) == (["timed out"], 1)
        await asyncio.to_thread(wait_until, lambda: not guests(os.getpid()))


ENDLESS = """
import asyncio
from tests.support.user_tools import call, processes, reply, started

async def main():
    async with processes({"p": {"tools": ["python"]}}, timeout_s=500.0) as pool:
        episode = await started(pool, "p")
        print("here", flush=True)
        await reply(episode, call("python", code="import time\\ntime.sleep(1000)"))

asyncio.run(main())
"""


@needs_bubblewrap
@pytest.mark.parametrize("victim", ["controller", pytest.param("environment process", marks=pytest.mark.extended)])
def test_no_sandbox_outlives_a_process_that_is_killed(victim: str) -> None:
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, cwd=PROJECT) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == b"here\n"
        [process] = environment_processes(controller.pid)
        wait_until(lambda: len(of_user(user_of(process))) >= 3)  # bubblewrap, guest, program
        before = of_user(user_of(process))
        os.kill(controller.pid if victim == "controller" else process, signal.SIGKILL)
        wait_until(lambda: not {*before} & {*of_user(user_of(process))})
        controller.kill()


async def test_where_no_sandbox_can_start_the_tool_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError) as raised:
        async with processes(PYTHON):
            pass
    assert str(raised.value).startswith(
        "rollout.multi_turn.environments: the tool python cannot run programs here: bubblewrap (bwrap) is not installed"
    )
