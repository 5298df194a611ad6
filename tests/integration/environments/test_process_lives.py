"""Environment processes: when they end, what they print, and what they share."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from environments.pool import EnvironmentProcesses
from tests.support.groups import PROJECT
from tests.support.user_tools import TOOLS, call, processes, reply, started, tools, write

LIMIT_S = 30

OWN = '''
import os, time
from environments.chat import ToolCall

print("imported")
CALLS = []

class Text(str): pass

def first(mark: str) -> list[str]:
    """Adds a mark.

    Args:
        mark: what is added.
    """
    print("called", mark)
    CALLS.append(mark)
    return CALLS

def second(mark: str) -> list[str]:
    """Adds a mark.

    Args:
        mark: what is added.
    """
    return first(mark)

def killed(path: str) -> str:
    """Takes its time, until its process has been killed as often as there are lines.

    Args:
        path: a file; each life of a process adds its pid.
    """
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\\n")
    while len(open(path).read().split()) < 3:
        time.sleep(0.01)
    return "alive"

def parse(text, schemas):
    if text == "broken":
        return None
    name, _, mark = text.partition(" ")
    return Text(""), [ToolCall(Text(name), {"mark": Text(mark)})]
'''


def ended(pid: int) -> bool:
    """Waits for a process that need not be a child of this one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], LIMIT_S)[0])
    finally:
        os.close(descriptor)


CONTROLLER = """
import asyncio
from pathlib import Path
from tests.support.user_tools import *

async def main():
    async with processes({"t": tools(Path(sys.argv[1]), "pid", "trouble")}, timeout_s=1000) as pool:
        episode = await started(pool, "t")
        print(*await reply(episode, call("pid")), flush=True)
        await reply(episode, call("trouble", kind=sys.argv[2]))

import sys
asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["hang", "hold"])
def test_a_process_ends_with_a_controller_that_is_killed(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", CONTROLLER, str(write(tmp_path, TOOLS)), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PROJECT) as controller:
        assert controller.stdout is not None
        pid = int(controller.stdout.readline())
        controller.kill()
    assert ended(pid)


async def test_leaving_in_mid_call_ends_the_processes(tmp_path: Path) -> None:
    async with processes({"t": tools(write(tmp_path, TOOLS), "pid", "trouble")}, timeout_s=1000) as pool:
        waiting, calling = await started(pool, "t"), await started(pool, "t")
        (pid,) = await reply(waiting, call("pid"))
        task = asyncio.create_task(reply(calling, call("trouble", kind="hang")))
        assert await reply(waiting, call("pid")) == [pid]
    assert ended(int(pid))
    with pytest.raises(RuntimeError, match="have been ended"):
        await task


async def test_a_process_that_is_killed_again_while_turns_are_repeated_costs_nothing(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    async with processes({"t": tools(write(tmp_path, OWN), "killed")}, timeout_s=1000) as pool:
        episodes = [await started(pool, "t") for _ in range(2)]
        lives.write_text("1\n1\n")
        assert await asyncio.gather(*(reply(one, call("killed", path=str(lives))) for one in episodes)) == [
            ["alive"],
            ["alive"],
        ]
        pid = int(lives.read_text().split()[-1])
        lives.write_text("")
        os.kill(pid, signal.SIGKILL)
        task = asyncio.create_task(reply(episodes[0], call("killed", path=str(lives))))
        async with asyncio.timeout(LIMIT_S):
            while not lives.read_text().strip():  # noqa: ASYNC110 - another process repeats the first turn
                await asyncio.sleep(0.01)
            os.kill(int(lives.read_text().split()[0]), signal.SIGKILL)
            lives.write_text("1\n1\n")
            assert await task == ["alive"]


async def test_a_process_with_a_stuck_call_gets_no_new_conversation_and_ends(tmp_path: Path) -> None:
    environments = {"t": tools(write(tmp_path, TOOLS), "pid", "trouble")}
    async with processes(environments, num_workers=2, timeout_s=0.5) as pool:
        stuck = await started(pool, "t")
        (pid,) = await reply(stuck, call("pid"))
        assert await reply(stuck, call("trouble", kind="hang")) == ["timed out"]
        others = [await started(pool, "t") for _ in range(4)]
        assert pid not in [await reply(other, call("pid")) for other in others]
        assert await reply(stuck, call("pid")) == [pid]
        stuck.abandon()
        assert await asyncio.to_thread(ended, int(pid))
        assert await reply(await started(pool, "t"), call("pid")) != [pid]


STARTED = """
import os, signal, threading
from pathlib import Path

LIVES = Path(__file__).with_suffix(".lives")
with LIVES.open("a") as file:
    file.write("x")
if LIVES.stat().st_size < %d:
    os.kill(os.getpid(), signal.%s)

def template() -> str:
    \"\"\"Says from what this process was forked: its pid, its threads, and whether it has gRPC.\"\"\"
    proc = Path(f"/proc/{os.getppid()}")
    return f"{os.getppid()} {len(list((proc / 'task').iterdir()))} {'grpc' in (proc / 'maps').read_text()}"
"""


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGSEGV"])
async def test_a_process_that_is_killed_while_it_loads_is_replaced(tmp_path: Path, signal_name: str) -> None:
    path = write(tmp_path, STARTED % (3, signal_name))
    async with processes({"t": tools(path, "template")}) as pool:
        assert len(await reply(await started(pool, "t"), call("template"))) == 1
    assert path.with_suffix(".lives").read_text() == "xxx"


async def test_processes_that_are_always_killed_while_they_load_are_no_mistake_of_the_configuration(
    tmp_path: Path,
) -> None:
    pool = processes({"t": tools(write(tmp_path, STARTED % (1000, "SIGKILL")), "template")})
    with pytest.raises(ChildProcessError, match=r"3 processes that loaded them ended, .* was killed by signal 9"):
        await pool.__aenter__()


async def test_processes_are_forked_from_one_with_one_thread_and_without_grpc(tmp_path: Path) -> None:
    async with processes({"t": tools(write(tmp_path, STARTED % (0, "SIGKILL")), "template")}) as pool:
        (said,) = await reply(await started(pool, "t"), call("template"))
    assert said.split()[1:] == ["1", "False"]
    assert ended(int(said.split()[0]))


async def test_a_template_that_is_killed_costs_nothing(tmp_path: Path) -> None:
    async with processes({"t": tools(write(tmp_path, STARTED % (0, "SIGKILL")), "template")}) as pool:
        episode = await started(pool, "t")
        before = (await episode.say("none", "stop")).messages
        (said,) = await reply(await started(pool, "t"), call("template"))
        os.kill(int(said.split()[0]), signal.SIGKILL)
        assert await asyncio.to_thread(ended, int(said.split()[0]))
        (again,) = await reply(await started(pool, "t"), call("template"))
        assert again.split()[0] != said.split()[0]
        assert before == ()


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, EnvironmentProcesses]:
    """A log, and processes with the tools and the parser of one file."""
    path, log = write(tmp_path, OWN), tmp_path / "environments.log"
    return log, processes({"t": tools(path, "first", "second")}, tool_format=f"{path}:parse", output=log)


async def test_tools_and_parser_of_one_file_share_its_globals(
    own: tuple[Path, EnvironmentProcesses], capfd: pytest.CaptureFixture[str]
) -> None:
    log, pool = own
    async with pool:
        episode = await started(pool, "t")
        assert await reply(episode, "first a") == ['["a"]']
        assert await reply(episode, "second b") == ['["a", "b"]']
        broken = await episode.say("broken", "stop")
    assert broken.lost.startswith("rollout.multi_turn.tool_format: TypeError: ")
    assert log.read_text() == "imported\ncalled a\ncalled b\n"
    assert capfd.readouterr() == ("", "")


async def test_what_a_users_parser_reads_is_in_the_answer(own: tuple[Path, EnvironmentProcesses]) -> None:
    _, pool = own
    async with pool:
        answer = await (await started(pool, "t")).say("first a", "stop")
        arguments = answer.calls[0]["function"]["arguments"]
        assert (answer.num_calls, answer.text, arguments) == (1, "", {"mark": "a"})
        assert type(arguments["mark"]) is str


THREADS = '''
import os, sys

LIBRARIES = sorted({"numpy", "torch"} & sys.modules.keys())

def threads() -> list:
    """Returns what libraries read when they choose their threads, and which of them were there before this file."""
    return [os.environ.get("OMP_NUM_THREADS"), sorted(os.sched_getaffinity(0)), LIBRARIES]
'''


@pytest.mark.parametrize("number", ["3", None])
async def test_nothing_but_the_controllers_environment_limits_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if number is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", number)
    async with processes({"t": tools(write(tmp_path, THREADS), "threads")}, timeout_s=1000) as pool:
        (told,) = await reply(await started(pool, "t"), call("threads"))
    assert json.loads(told) == [number, sorted(os.sched_getaffinity(0)), []]
