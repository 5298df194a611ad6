"""Coroutines that begin contexts anew and go back to earlier turns: what they say, what is refused and repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from environments.messages import Answer, NoRoom, Room, TurnLimits
from environments.pool import EnvironmentProcesses, Episode
from environments.record import Record
from tests.support.user_tools import call, contents, processes, write

OWN = '''
import os, random, time
from environments.chat import ContextFull, Step, Turn
from environments.messages import TurnLimits

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

def user(text):
    return {"role": "user", "content": text}

def kill_once(file):
    if not os.path.exists(file):
        open(file, "w").close()
        os.kill(os.getpid(), 9)

async def compact(chat, row):
    """Goes on until the context is full, then begins anew, and at the end goes back to the first turn."""
    first = turn = await chat.turn(user("begin"))
    chat.reward(0.5)
    try:
        while True:
            turn = await chat.turn(user(f"{turn.room.context} left"))
    except ContextFull as full:
        kill_once(row["killed"])
        turn = await chat.restart({"role": "system", "content": str(full)}, user("anew"))
    await chat.turn(user("back"), after=first)
    return {"score": 1, "number": turn.number}

async def careless(chat, row):
    await chat.turn()
    chat.reward(0.5)
    await chat.turn(user("no room"))

class Patient:
    def reset(self): self.steps = 0
    def step(self, text):
        self.steps += 1
        return Step("no room", reward=0.5)
    def get_reward(self): return {"score": 2, "steps": self.steps}

async def with_tools(chat, row):
    first = await chat.turn()
    inner = await chat.restart(user("a"), tools=[TOOL])
    none = await chat.restart(user("b"), tools=())
    again = await chat.turn(user("c"), after=inner)
    own = await chat.turn(user("d"), after=first)
    return {"score": 0, "calls": "".join(str(len(turn.calls)) for turn in (first, inner, none, again, own))}

async def many(chat, row):
    turn = await chat.restart(user("0"))
    for number in range(1, 1000):
        turn = await chat.restart(user(str(number)))
        if number == 900:
            kill_once(row["killed"])
    return turn.number

async def dice(chat, row):
    number = str(random.SystemRandom().getrandbits(60))
    turn = await chat.restart(user(number), limits=TurnLimits(max_tokens=3))
    try:
        await chat.turn(user(f"{number} {turn.room}"))
    except ContextFull:
        await chat.turn(user(number), after=turn)

async def wrong(chat, row):
    first = await chat.turn()
    message = {"role": "user", "content": "x"}
    tool = {"type": "function", "function": {"name": "f"}}
    ways = {
        "none": lambda: chat.restart(),
        "role": lambda: chat.restart({"role": "developer", "content": "x"}),
        "text": lambda: chat.restart({"role": "user", "content": [{"type": "text", "text": "x"}]}),
        "long": lambda: chat.restart(*[{"role": "user", "content": "x" * 600_000}] * 2),
        "calls": lambda: chat.restart(message, {"role": "assistant", "content": None, "tool_calls": "f()"}),
        "tool": lambda: chat.restart(message, tools=[{"name": "f"}]),
        "tools": lambda: chat.restart(message, tools=[tool | {"more": "x" * 2**20}]),
        "deep": lambda: chat.restart({**message, "more": nested(200)}),
        "after": lambda: chat.turn(message, after=Turn("", (), "stop", number=2)),
        "limit": lambda: chat.turn(message, limits=TurnLimits(max_tokens=0)),
        "stop": lambda: chat.turn(message, limits=TurnLimits(stop=("",))),
        "half": lambda: chat.turn(message, limits=TurnLimits(stop=("\\ud800",))),
    }
    await ways[row["way"]]()

def nested(depth):
    return [nested(depth - 1)] if depth else []
'''


def coroutine(folder: Path, name: str) -> dict[str, Any]:
    return {"c": {"path": str(write(folder, OWN)), "name": name}}


def begin(pool: EnvironmentProcesses, **row: Any) -> Episode:
    return pool.begin("c", {"data_source": "c", **row}, seed=1)


async def test_a_coroutine_begins_anew_when_its_context_is_full_and_goes_back_to_an_earlier_turn(
    tmp_path: Path,
) -> None:
    async with processes(coroutine(tmp_path, "compact")) as pool:
        episode = begin(pool, killed=str(tmp_path / "killed"))
        assert contents(await episode.start()) == ["begin"]
        answer = await episode.say("one", "stop", room=Room(7, 90))
        assert (contents(answer), answer.reward) == (["7 left"], 0.5)
        answer = await episode.refuse(NoRoom(Room(7, 90), 9))
        full = "the messages have 9 tokens, and one more must fit; the context has room for 7, the response for 90"
        assert answer == Answer(
            messages=({"role": "system", "content": full}, {"role": "user", "content": "anew"}), begins_context=True
        )
        answer = await episode.say("two", "context")
        assert (contents(answer), answer.after_turn) == (["back"], 1)
        assert (await episode.say("three", "stop")).final == {"score": 1.0, "number": 2}
    assert (tmp_path / "killed").exists()


@pytest.mark.parametrize(("name", "final"), [("careless", None), ("Patient", {"score": 2.0, "steps": 1})])
async def test_a_full_context_that_nobody_expects_ends_the_conversation_with_its_rewards(
    tmp_path: Path, name: str, final: dict[str, Any] | None
) -> None:
    async with processes(coroutine(tmp_path, name)) as pool:
        episode = begin(pool)
        await episode.start()
        assert (await episode.say("one", "stop")).reward == 0.5
        assert await episode.refuse(NoRoom(Room(2, 90), 9)) == Answer(is_over=True, final=final)


async def test_calls_are_read_by_the_tools_of_the_context_in_which_a_turn_stands(tmp_path: Path) -> None:
    async with processes(coroutine(tmp_path, "with_tools")) as pool:
        episode = begin(pool)
        answers = [await episode.start()]
        while not answers[-1].is_over:
            answers.append(await episode.say(call("look"), "stop"))
    assert answers[-1].final == {"score": 0.0, "calls": "11011"}
    assert [answer.num_calls for answer in answers] == [0, 1, 1, 0, 1, 1]
    assert [len(answer.tools or ()) for answer in answers] == [0, 1, 0, 0, 0, 0]
    assert [answer.tools is None for answer in answers] == [True, False, False, True, True, True]


async def test_a_thousand_contexts_outlive_their_process(tmp_path: Path) -> None:
    async with processes(coroutine(tmp_path, "many")) as pool:
        episode = begin(pool, killed=str(tmp_path / "killed"))
        answer = await episode.start()
        for number in range(1000):
            assert (answer.begins_context, contents(answer)) == (True, [str(number)])
            answer = await episode.say("one", "stop", room=Room(number, number))
    assert (tmp_path / "killed").exists()
    assert answer.final == {"score": 1000.0}


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("none", "expected the messages of a context, got none"),
        ("role", "expected messages with role 'system' or 'user' or 'assistant' or 'tool' and a text as content, got"),
        ("text", "expected messages with role 'system' or 'user' or 'assistant' or 'tool' and a text as content, got"),
        ("long", "the messages of a context have 1,200,066 bytes, expected at most 1 MiB in all"),
        ("calls", "expected tool_calls as a list of {'type': 'function', 'function': {'name': ..., 'arguments': ...}}"),
        ("tool", "expected tools as JSON schemas, {'type': 'function', 'function': {'name': ...}}, got {'name': 'f'}"),
        ("tools", "the tools of a context have 1,048,637 bytes, expected at most 1 MiB in all"),
        ("deep", "mappings and lists lie in each other more than 100 deep"),
        ("after", "after: expected a turn from 1 to 1 of this one, got 2"),
        ("limit", "max_tokens: expected a whole number of at least 1, or None, got 0"),
        ("stop", "stop: expected a tuple of at most 16 texts, of 1 to 1,000 characters each, got ('',)"),
        ("half", "stop: expected a tuple of at most 16 texts, of 1 to 1,000 characters each, got ('\\ud800',)"),
    ],
)
async def test_what_is_no_context_fails_its_coroutine_with_one_sentence(
    tmp_path: Path, way: str, expected: str
) -> None:
    async with processes(coroutine(tmp_path, "wrong")) as pool:
        episode = begin(pool, way=way)
        await episode.start()
        answer = await episode.say("one", "stop")
    assert f"ValueError: {expected}" in answer.lost
    assert "\n" not in answer.lost


async def played(pool: EnvironmentProcesses, record: Record, room: Room) -> list[Answer]:
    """Plays `dice` in step 1: the second answer has no room."""
    episode = pool.begin("c", {"data_source": "c"}, 1, record.at_step(1, "a").replay(0))
    return [
        await episode.start(),
        await episode.say("one", "stop", room=room),
        await episode.refuse(NoRoom(room, 9)),
        await episode.say("two", "stop", room=Room(0, 0)),
    ]


async def test_a_recorded_conversation_replays_its_contexts_and_one_with_less_room_is_asked_anew(
    tmp_path: Path,
) -> None:
    record = Record(tmp_path / "episodes")
    async with processes(coroutine(tmp_path, "dice")) as pool:
        answers = await played(pool, record, Room(3, 90))
        assert [(one.begins_context, one.after_turn, one.limits.max_tokens) for one in answers] == [
            (True, None, 3),
            (False, None, None),
            (False, 1, None),
            (False, None, None),
        ]
        assert answers[0].limits == TurnLimits(max_tokens=3)
        assert await played(pool, Record(tmp_path / "episodes"), Room(3, 90)) == answers
        others = await played(pool, Record(tmp_path / "episodes"), Room(2, 90))
    assert others[0] == answers[0]
    assert all(other != answer for other, answer in zip(others[1:3], answers[1:3], strict=True))
