"""Agents that call the chat API: functions and programs, what they are given, how they end, and their rewards."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from environments.messages import Answer
from environments.pool import EnvironmentProcesses, Episode
from splitppo.config_error import ConfigError
from tests.support.groups import PROJECT, free_address
from tests.support.user_tools import contents, processes, write

# An agent of few imports: it asks twice, and does what its row says in between.
AGENT = """
import json, os, subprocess, sys, time, urllib.request

def ask(url, key, *messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]

def post_reward(url, key, body):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{url}/reward", json.dumps(body).encode(), headers)).read()

def talk(url, key, row, between=lambda: None):
    question = {"role": "user", "content": f"{row['prompt'][-1]['content']} ({row['seed']})"}
    first = ask(url, key, question)
    between()
    second = ask(url, key, question, first, {"role": "user", "content": first["content"] + "?"})
    return len(first["content"] + second["content"])
"""

FUNCTIONS = """
import asyncio, sys, time
from talk import talk

def plain(endpoint, row):
    return {"score": talk(endpoint.base_url, endpoint.api_key, row), "name": row["name"]}

def where(endpoint, row):
    return {"score": talk(endpoint.base_url, endpoint.api_key, row), "url": endpoint.base_url}

async def waiting(endpoint, row):
    return await asyncio.to_thread(talk, endpoint.base_url, endpoint.api_key, row)

def asks_on(endpoint, row):
    while True:
        try:
            talk(endpoint.base_url, endpoint.api_key, row)
        except Exception:
            pass

async def blocks(endpoint, row):
    time.sleep(1000)

def trouble(endpoint, row):
    def between():
        if row["name"] == "raises":
            raise ValueError("not today")
        if row["name"] == "hangs":
            asyncio.run(asyncio.sleep(1000))
        if row["name"] == "exits":
            sys.exit(3)
    if row["name"] == "early":
        raise ValueError("no")
    if row["name"] == "silent":
        return 1.0
    talk(endpoint.base_url, endpoint.api_key, row, between)
    return "a text" if row["name"] == "returns a text" else None
"""

PROGRAM = """
import json, os, signal, subprocess, sys, time
from talk import ask, post_reward, talk

row = json.loads(sys.stdin.readline())
url, key, kind = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], row["name"]

def start(command):
    subprocess.Popen(["setsid", "sh", "-c", f"{command} & sleep 1000"], start_new_session=True)

def between():
    if kind == "exits":
        print("one line", file=sys.stderr)
        sys.exit(3)
    if kind == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if "kills its" in kind:
        start("env -i setsid sleep 1001")
        start("sleep 1001")
        time.sleep(0.5)
        parent = os.getppid()
        with open(f"/proc/{parent}/stat") as stat:
            grandparent = int(stat.read().rpartition(")")[2].split()[1])
        if kind == "kills its group":
            os.killpg(0, signal.SIGKILL)
        if kind.startswith("stops its parent"):
            os.kill(parent, signal.SIGSTOP)
        os.kill(parent if kind == "kills its parent" else grandparent, signal.SIGKILL)
        time.sleep(1000)
    if kind == "stops its parent":
        os.kill(os.getppid(), signal.SIGSTOP)
        sys.exit(3)
    if kind == "hangs":
        time.sleep(1000)
    if kind.startswith("forks"):
        for _ in range(20):
            if os.fork() == 0:
                os.setsid()
                start("sleep 1001")
                time.sleep(1000)
        if kind == "forks and hangs":
            time.sleep(1000)
        sys.exit(4)
    if kind == "prints":
        for _ in range(100):
            sys.stdout.write("x" * 1_000_000)
    if kind.startswith("says "):
        print(kind.removeprefix("says "))
        sys.exit()
    if kind == "posts nested":
        post_reward(url, row["reward_key"], {"score": 9, "more": json.loads("[" * 200 + "]" * 200)})
    if kind == "posts":
        post_reward(url, key, {"score": 9})
    if kind == "variables":
        print(json.dumps({"score": 1, **os.environ}))
        sys.exit()

if kind == "early":
    sys.exit("nothing works")
if kind == "shell":  # does what the policy says
    question = {"role": "user", "content": "Say (5)"}
    first = ask(url, key, question)
    subprocess.run(first["content"], shell=True)
    ask(url, key, question, first, {"role": "user", "content": "yes?"})
    sys.exit()
if kind == "silent":
    sys.exit()
while kind == "asks on":
    try:
        talk(url, key, row)
    except Exception:
        pass
if kind == "bad request":
    try:
        ask(url, key, {"role": "king", "content": "x"})
    except Exception:
        sys.exit()
length = talk(url, key, row, between)
if kind == "reward":
    post_reward(url, row["reward_key"], {"score": length})
print(length if kind == "number" else json.dumps({"score": length, "name": kind}))
"""

PROMPT = [{"role": "user", "content": "Say"}]


def write_agents(folder: Path) -> Path:
    """Writes the agents of this file, and returns the file of functions; the file of the program is beside it."""
    write(folder, AGENT, "talk.py")
    write(folder, PROGRAM, "program.py")
    return write(folder, FUNCTIONS, "functions.py")


def program(folder: Path, **keys: Any) -> dict[str, Any]:
    """Returns the configuration of the program."""
    return {"command": [sys.executable, str(folder / "program.py")], **keys}


def begun(pool: EnvironmentProcesses, data_source: str, name: str = "") -> Episode:
    """Returns an episode with an agent, which has not been started."""
    row = {"data_source": data_source, "ground_truth": None, "name": name}
    return pool.begin(data_source, row, 5, prompt=PROMPT)


async def held(pool: EnvironmentProcesses, data_source: str, name: str = "") -> Answer:
    """Holds a conversation of two turns; returns the last answer."""
    episode = begun(pool, data_source, name)
    first = await episode.start()
    if first.is_over:
        return first
    assert first.begins_context
    assert contents(first) == ["Say (5)"]
    second = await episode.say("yes", "stop")
    if second.is_over:
        return second
    assert contents(second) == ["yes?"]
    return await episode.say("no", "stop")


@asynccontextmanager
async def nothing_is_left() -> AsyncIterator[None]:
    """Checks that all processes have ended which are started meanwhile in this folder; others may run tests, too."""
    before = {process.pid for process in psutil.process_iter()}

    def left() -> list[str]:
        new = [process for process in psutil.process_iter() if process.pid not in before]
        shown = []
        for process in new:
            try:
                line = " ".join(process.cmdline())
                is_here = Path(process.cwd()) == Path.cwd()
            except psutil.Error:
                continue
            if is_here and ("sleep 100" in line or "program.py" in line):
                shown.append(line)
        return shown

    yield
    await until(lambda: not left())
    assert left() == []


async def until(holds: Callable[[], bool]) -> None:
    """Waits until something holds, or for 20 s."""
    for _ in range(400):
        if holds():
            return
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("kind", ["plain", "waiting", "program"])
async def test_an_agent_makes_its_messages_asks_and_is_rewarded(tmp_path: Path, kind: str) -> None:
    functions = write_agents(tmp_path)
    agent = program(tmp_path, reward="output") if kind == "program" else {"agent": f"{functions}:{kind}"}
    async with processes({"agent": agent}, timeout_s=20.0) as pool:
        answers = await asyncio.gather(*(held(pool, "agent", "x") for _ in range(5)))
    for answer in answers:
        assert (answer.is_over, answer.lost, answer.agent_error) == (True, "", "")
        assert answer.final is not None
        assert answer.final["score"] == 5.0


@pytest.mark.parametrize(
    ("reward", "name", "score"),
    [
        ("output", "x", 5.0),
        ("output", "number", None),
        ("output", "posts", None),
        pytest.param("output", "says " + "[" * 60_000, None, id="deep"),
        pytest.param("output", f'says {{"score": 9, "more": {"[" * 900}{"]" * 900}}}', None, id="nested"),
        pytest.param("output", f'says {{"score": {"9" * 5000}}}', None, id="digits"),
        ("endpoint", "posts nested", None),
        (None, "x", None),
        ("endpoint", "x", None),
        ("endpoint", "reward", 5.0),
        ("endpoint", "posts", None),
    ],
)
async def test_a_program_is_rewarded_by_the_way_that_the_configuration_names(
    tmp_path: Path, reward: str | None, name: str, score: float | None
) -> None:
    write_agents(tmp_path)
    async with processes({"agent": program(tmp_path, reward=reward)}, timeout_s=20.0) as pool:
        answer = await held(pool, "agent", name)
    # With the key that lets in to the policy, no reward can be posted: the request is refused, and the program ends.
    assert bool(answer.agent_error) == (name.startswith("posts") or (reward is not None and score is None))
    why = {
        ("output", "number"): "its last line is '5', expected a JSON object with score, by reward: output",
        ("endpoint", "x"): "it posted no reward (POST /v1/reward with reward_key of its row)",
    }
    assert why.get((str(reward), name), "") in answer.agent_error
    assert answer.lost == ""
    assert (answer.final or {"score": None})["score"] == score


POST = """
import json, os, urllib.request
for key in {os.environ["OPENAI_API_KEY"], *os.environ.values()}:
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    try:
        url = os.environ["OPENAI_BASE_URL"] + "/reward"
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(dict(score=9)).encode(), headers))
    except Exception as error:
        print(error)
print(json.dumps(dict(score=9)))
"""


@pytest.mark.parametrize(("reward", "score"), [(None, None), ("endpoint", None), ("output", 9.0)])
async def test_a_policy_with_the_agents_shell_is_rewarded_only_by_the_way_that_the_configuration_names(
    tmp_path: Path, reward: str | None, score: float | None
) -> None:
    write_agents(tmp_path)
    file = write(tmp_path, POST, "post.py")
    async with processes({"agent": program(tmp_path, reward=reward)}, timeout_s=20.0) as pool:
        episode = begun(pool, "agent", "shell")
        await episode.start()
        assert contents(await episode.say(f"{sys.executable} {file}", "stop")) == ["yes?"]
        answer = await episode.say("no", "stop")
    assert (answer.is_over, answer.lost, bool(answer.agent_error)) == (True, "", reward == "endpoint")
    assert (answer.final or {"score": None})["score"] == score


async def test_the_agents_of_the_documentation_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_TOKEN", "a token")
    text = (PROJECT / "docs/agents.md").read_text()
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        write(tmp_path, block, block.split()[1])
    shown = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]
    function, command = (one["rollout"]["multi_turn"]["environments"]["default"] for one in shown)
    function["agent"] = f"{tmp_path}/{function['agent']}"
    command["command"] = [sys.executable, str(tmp_path / command["command"][1])]
    async with processes({"function": function, "command": command}, timeout_s=30.0) as pool:
        row = {"ground_truth": "4"}
        prompt = [{"role": "user", "content": "What is 2 + 2?"}]
        by_function = pool.begin("function", row, 1, prompt=prompt)
        assert contents(await by_function.start()) == ["Answer with a number alone.", "What is 2 + 2?"]
        assert contents(await by_function.say("5", "stop")) == ["No. Try again."]
        assert (await by_function.say("4", "stop")).final == {"score": 0.7}
        by_command = pool.begin("command", row, 1, prompt=prompt)
        assert contents(await by_command.start()) == ["What is 2 + 2?"]
        assert (await by_command.say("4", "stop")).final == {"score": 1.0}


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("raises", "line 12: ValueError: not today"),
        ("exits", "line 16: SystemExit: 3"),
        ("hangs", "it took longer than 2 s"),
        ("returns a text", "the agent returned 'a text', expected a number, or a dict with 'score'"),
    ],
)
async def test_a_function_that_fails_after_an_answer_scores_what_it_has_given(
    tmp_path: Path, name: str, error: str
) -> None:
    functions = write_agents(tmp_path)
    async with processes({"agent": {"agent": f"{functions}:trouble"}}) as pool:
        answer = await held(pool, "agent", name)
    assert (answer.is_over, answer.lost, answer.final) == (True, "", None)
    assert answer.agent_error.startswith(f"{functions}:trouble")
    assert error.split(": ", 1)[-1] in answer.agent_error
    assert answer.agent_is_wrong == (name == "returns a text")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("exits", "it ended with exit code 3: one line"),
        ("is killed", "it was ended by SIGKILL"),
        ("kills its parent", "it was ended by SIGKILL"),
        ("kills its grandparent", "it was ended by SIGKILL"),
        ("kills its group", "it was ended by SIGKILL"),
        ("stops its parent and kills its grandparent", "it "),
        ("stops its parent", "it took longer than 2 s until its next request"),
        ("hangs", "it took longer than 2 s until its next request"),
        ("forks", "it ended with exit code 4"),
        ("prints", "it printed more than 64 MiB"),
    ],
)
async def test_a_program_that_fails_after_an_answer_scores_what_it_has_given_and_leaves_nothing_running(
    tmp_path: Path, name: str, error: str
) -> None:
    write_agents(tmp_path)
    async with nothing_is_left(), processes({"agent": program(tmp_path, reward="output")}) as pool:
        answer, other = await asyncio.gather(held(pool, "agent", name), held(pool, "agent", "x"))
    assert (answer.is_over, answer.lost, answer.final) == (True, "", None)
    assert error in answer.agent_error
    assert other.final == {"score": 5.0, "name": "x"}


@pytest.mark.parametrize("kind", ["function", "program"])
async def test_an_agent_that_asks_on_when_the_policy_says_no_more_is_ended(tmp_path: Path, kind: str) -> None:
    functions = write_agents(tmp_path)
    agent = program(tmp_path) if kind == "program" else {"agent": f"{functions}:asks_on"}
    async with nothing_is_left(), processes({"agent": agent}, timeout_s=1000.0) as pool:
        episode = begun(pool, "agent", "asks on")
        await episode.start()
        await episode.say("yes", "stop")
        last = await episode.end()
    assert (last.is_over, last.lost, last.final) == (True, "", None)
    assert "it asked 10 times more after it was told that the policy has no further turn" in last.agent_error


async def test_an_agent_that_holds_up_its_process_is_named(tmp_path: Path) -> None:
    agent = {"agent": f"{write_agents(tmp_path)}:blocks"}
    async with processes({"agent": agent}) as pool:
        lost = (await begun(pool, "agent").start()).lost
    assert lost.startswith("rollout.multi_turn.environments.agent: ")
    assert "functions.py:blocks: for more than 2 s (rollout.multi_turn.timeout_s) it let nothing else run" in lost


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        ("function", "early", "ValueError: no"),
        ("program", "early", "it ended with exit code 1: nothing works"),
        ("program", "silent", "it never asked the policy: it printed nothing"),
        (
            "program",
            "bad request",
            "it ended without an answer; its last request was refused: messages[0]: expected role",
        ),
        ("function", "silent", "it never asked the policy"),
    ],
)
async def test_an_agent_that_fails_before_the_policy_has_answered_is_a_failed_environment(
    tmp_path: Path, kind: str, name: str, why: str
) -> None:
    functions = write_agents(tmp_path)
    agent = program(tmp_path) if kind == "program" else {"agent": f"{functions}:trouble"}
    async with processes({"agent": agent}, timeout_s=20.0) as pool:
        answer = await held(pool, "agent", name)
    assert answer.is_over
    assert why in answer.lost


async def test_a_program_has_no_secret_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_agents(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "secret of the run")
    monkeypatch.setenv("SEARCH_TOKEN", "secret of a tool")
    own = {"TOKEN_FOR_SEARCH": "$SEARCH_TOKEN", "OMP_NUM_THREADS": "3"}
    async with processes({"agent": program(tmp_path, reward="output", env=own)}, timeout_s=20.0) as pool:
        answer = await held(pool, "agent", "variables")
    seen = answer.final or {}
    assert "secret of the run" not in seen.values()
    assert (seen["TOKEN_FOR_SEARCH"], seen["OMP_NUM_THREADS"]) == ("secret of a tool", "3")
    assert seen["ANTHROPIC_BASE_URL"] + "/v1" == seen["OPENAI_BASE_URL"]
    assert seen["PATH"] == os.environ["PATH"]


async def test_programs_that_wait_for_the_policy_make_room_for_others(tmp_path: Path) -> None:
    write_agents(tmp_path)
    agent = program(tmp_path, reward="output")
    num_talks = 7
    async with processes({"agent": agent}, timeout_s=20.0, gateway={"max_agents": 2}) as pool:
        episodes = [begun(pool, "agent", str(number)) for number in range(num_talks)]
        firsts = await asyncio.gather(*(episode.start() for episode in episodes))
        assert [contents(first) for first in firsts] == [["Say (5)"]] * num_talks
        assert num_programs(tmp_path) <= 2
        seconds = await asyncio.gather(*(episode.say("yes", "stop") for episode in episodes))
        assert [contents(second) for second in seconds] == [["yes?"]] * num_talks
        assert num_programs(tmp_path) <= 2
        # The others wait for one whose turn comes last: whoever waits for the policy holds up nobody.
        lasts = [await episode.say("no", "stop") for episode in reversed(episodes)]
    assert [last.final for last in reversed(lasts)] == [{"score": 5.0, "name": str(n)} for n in range(num_talks)]
    assert [last.agent_error for last in lasts] == [""] * num_talks


def num_programs(folder: Path) -> int:
    """Returns how many programs live, without those who supervise them."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return sum(str(folder / "program.py") in line and "-S" not in line for line in lines)


async def test_an_agent_that_is_told_that_the_policy_says_no_more_has_not_failed(tmp_path: Path) -> None:
    functions = write_agents(tmp_path)
    agents = {"program": program(tmp_path, reward="output"), "function": {"agent": f"{functions}:plain"}}
    async with processes(agents, timeout_s=20.0) as pool:
        for kind in agents:
            episode = begun(pool, kind, "x")
            await episode.start()
            await episode.say("yes", "length")
            last = await episode.end()
            assert (last.is_over, last.lost, last.agent_error, last.final) == (True, "", "", None)


async def test_a_lost_process_is_replaced_and_its_agents_are_answered_from_what_was_said(tmp_path: Path) -> None:
    functions = write_agents(tmp_path)
    agents = {"program": program(tmp_path, reward="output"), "function": {"agent": f"{functions}:plain"}}
    of_other_tests = {*psutil.Process().children(recursive=True)}
    async with nothing_is_left(), processes(agents, timeout_s=20.0) as pool:
        episodes = [begun(pool, kind, "x") for kind in agents]
        for episode in episodes:
            await episode.start()
            await episode.say("yes", "stop")
        started = {*psutil.Process().children(recursive=True)} - of_other_tests
        [child] = filter(is_environment, started)
        child.kill()
        lasts = await asyncio.gather(*(episode.say("no", "stop") for episode in episodes))
    assert [last.final for last in lasts] == [{"score": 5.0, "name": "x"}] * 2


CONTROLLER = """
import asyncio, sys
from tests.support.user_tools import processes

async def main():
    async with processes({"agent": {"command": [sys.executable, sys.argv[1]]}}, timeout_s=1000) as pool:
        episode = pool.begin("agent", {"name": "forks and hangs"}, 5, prompt=[{"content": "Say"}])
        await episode.start()
        await episode.say("yes", "stop")

asyncio.run(main())
"""


async def test_what_an_agent_has_started_ends_with_a_controller_that_is_killed(tmp_path: Path) -> None:
    write_agents(tmp_path)
    command = [sys.executable, "-c", CONTROLLER, str(tmp_path / "program.py")]
    async with nothing_is_left():
        controller = await asyncio.create_subprocess_exec(*command, cwd=PROJECT)
        await until(lambda: num_programs(tmp_path) > 20)
        assert num_programs(tmp_path) > 20
        controller.kill()
        await controller.wait()


def is_environment(process: psutil.Process) -> bool:
    """Returns whether a process has programs or is about to: it is forked from the template, and no program."""
    parent = process.parent()
    return parent is not None and parent.pid != os.getpid() and parent.ppid() == os.getpid()


async def test_each_process_listens_at_the_first_free_port_from_the_configured_one_on(tmp_path: Path) -> None:
    functions = write_agents(tmp_path)
    port = int(free_address().rpartition(":")[2])
    agent = {"agent": f"{functions}:where"}
    async with processes({"agent": agent}, timeout_s=20.0, num_workers=2, gateway={"port": port}) as pool:
        answers = await asyncio.gather(*(held(pool, "agent") for _ in range(2)))
    ports = sorted(int(str((answer.final or {})["url"]).rpartition(":")[2].removesuffix("/v1")) for answer in answers)
    assert ports[0] == port
    assert port < ports[1] < port + 100


async def test_an_address_at_which_nobody_can_listen_is_refused(tmp_path: Path) -> None:
    functions = write_agents(tmp_path)
    with pytest.raises(ConfigError, match=r"^rollout\.multi_turn\.gateway: 192\.0\.2\.1, port 0: "):
        async with processes({"agent": {"agent": f"{functions}:plain"}}, gateway={"host": "192.0.2.1"}):
            pass


@pytest.mark.parametrize(
    ("agent", "error"),
    [
        ({"command": ["no-such-program"]}, "key 'rollout.multi_turn.environments.agent.command': there is no program"),
        ({"agent": "FILE:nothing"}, "has no class or function 'nothing'"),
        ({"agent": "FILE:ask"}, "expected run(endpoint, row), got ask(): "),
        ({"command": ["sh"], "env": {"A": "$NOT_SET"}}, "environment variables that are set: "),
    ],
)
async def test_an_agent_that_cannot_be_started_is_refused(tmp_path: Path, agent: dict[str, Any], error: str) -> None:
    file = write(tmp_path, "def ask(): pass\n")
    given = {key: value.replace("FILE", str(file)) if isinstance(value, str) else value for key, value in agent.items()}
    with pytest.raises(ValueError, match="agent") as refused:
        async with processes({"agent": given}):
            pass
    assert error in str(refused.value)
