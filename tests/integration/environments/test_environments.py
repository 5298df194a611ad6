"""Environments of the user's: classes with tool methods or step, coroutines, and what ends with their failure."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from environments.messages import Answer
from tests.support.user_tools import call, contents, processes, reply, started, write

# As in TRL's documentation of `environment_factory`, but that its game needs no server.
TRL = '''
class Client:
    def reset(self):
        self.word, self.text = "crane", "Guess a word of five letters."
        return self.text

    def step(self, guess):
        feedback = "".join("G" if a == b else "Y" if a in self.word else "X" for a, b in zip(guess[1:], self.word))
        self.text += "\\n" + feedback
        return self.text, float(feedback == "GGGGG"), feedback == "GGGGG"


class WordleEnv:
    def __init__(self):
        self.client = Client()

    def reset(self, **kwargs) -> str | None:
        self._last_full_feedback = self.client.reset()
        self.reward = 0.0
        self.done = False
        return self._last_full_feedback

    def guess(self, guess: str) -> str:
        """
        Make a guess in the Wordle environment.

        Args:
            guess: The guessed word, formatted as '[abcde]'

        Returns:
            The feedback message from the environment.
        """
        if self.done:
            raise ValueError("Game over.")
        _full_feedback, reward, done = self.client.step(guess)
        feedback = _full_feedback[len(self._last_full_feedback):]
        self._last_full_feedback = _full_feedback
        self.reward = reward
        self.done = done
        return feedback

    def get_reward(self) -> float:
        return self.reward


class EchoToolEnv:
    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return None

    async def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        self.reward = len(message)
        return message
'''

GAMES = '''
import random, sqlite3
from environments.chat import ConversationOver, Step, tool_message

class GuessNumber:
    def __init__(self, top, log):
        self.top, self.log = top, log

    async def reset(self, *, seed, ground_truth):
        self.number = random.Random(seed).randint(1, self.top)
        self.is_found = False
        self.hint = ground_truth
        return "Guess."

    def guess(self, number: int) -> Step:
        """Guesses.

        Args:
            number: the guess.
        """
        self.is_found = number == self.number
        text = "right" if self.is_found else "higher" if number < self.number else "lower"
        return Step(text, reward=1.0 if self.is_found else -0.25, done=self.is_found, info={"last": number, "t": text})

    async def get_reward(self):
        return {"score": self.is_found, "number": self.number, "hint": [self.hint]}

    def close(self):
        with open(self.log, "a") as file:
            file.write("closed ")


class Sqlite:
    def reset(self):
        self.data_base = sqlite3.connect(":memory:")

    def count(self) -> int:
        """Counts."""
        return self.data_base.execute("select 1 + 1").fetchone()[0]


class Reversed:
    def reset(self):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return Step(text[::-1], 0.5, self.turns == 3, {"turns": self.turns, "nan": float("nan")})


async def converse(chat, row):
    turn = await chat.turn({"role": "user", "content": row["question"]})
    try:
        for _ in range(2):
            chat.reward(0.25)
            chat.reward(0.5)
            chat.note(length=len(turn.text), seed=chat.seed)
            turn = await chat.turn(*[tool_message(one, await chat.run(len, one.name)) for one in turn.calls])
    except ConversationOver:
        return {"score": -1, "why": "cut"}
    return 2
'''


def game(path: Path, name: str, **kwargs: Any) -> dict[str, Any]:
    return {"path": str(path), "name": name, "kwargs": kwargs}


async def test_classes_of_trls_documentation_run_unchanged(tmp_path: Path) -> None:
    path = write(tmp_path, TRL)
    async with processes({"wordle": game(path, "WordleEnv"), "echo": game(path, "EchoToolEnv")}) as pool:
        assert [schema["function"]["name"] for schema in pool.schemas_of("wordle")] == ["guess"]
        wordle = pool.begin("wordle", {"ground_truth": None, "difficulty": 3}, seed=1)
        told = [{"role": "user", "content": "Guess a word of five letters."}]
        assert await wordle.start() == Answer(messages=tuple(told))
        assert await reply(wordle, call("guess", guess="[react]")) == ["\nYYGYX"]
        assert await reply(wordle, call("guess", guess="[crane]")) == ["\nGGGGG"]
        assert await reply(wordle, call("guess", guess="[crane]")) == ["Game over."]
        assert await wordle.say("I have found it.", "stop") == Answer(
            is_over=True, final={"score": 1.0}, text="I have found it."
        )
        echo = await started(pool, "echo")
        assert await reply(echo, call("echo", message="abc")) == ["abc"]
        assert (await echo.end()).is_over


async def test_a_class_with_tools_gives_rewards_and_ends_the_conversation(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    environment = game(write(tmp_path, GAMES), "GuessNumber", top=3, log=str(closed))
    async with processes({"default": environment}) as pool:
        found = []
        for number in (1, 2, 3):
            episode = pool.begin("default", {"ground_truth": 7, "more": 1}, seed=5)
            assert contents(await episode.start()) == ["Guess."]
            answer = await episode.say("I think " + call("guess", number=number), "stop")
            assert answer.notes == {"last": number}
            assert answer.text == "I think "
            if answer.is_over:
                assert answer.reward == 1.0
                assert answer.final == {"score": 1.0, "number": number, "hint": "[7]"}
            else:
                assert answer.reward == -0.25
                answer = await episode.end()
                assert answer.is_over
                assert answer.final is not None
                assert answer.final["score"] == 0.0
            found.append(answer.final["number"])
        assert len(set(found)) == 1
        assert closed.read_text() == "closed closed closed "


async def test_sync_methods_of_an_object_run_in_one_thread(tmp_path: Path) -> None:
    async with processes({"s": game(write(tmp_path, GAMES), "Sqlite")}) as pool:
        episodes = [await started(pool, "s") for _ in range(20)]
        for _ in range(3):
            assert await asyncio.gather(*(reply(episode, call("count")) for episode in episodes)) == [["2"]] * 20


async def test_a_class_with_step_needs_no_tools(tmp_path: Path) -> None:
    async with processes({"r": game(write(tmp_path, GAMES), "Reversed")}) as pool:
        assert not pool.schemas_of("r")
        episode = await started(pool, "r")
        for turn in (1, 2):
            answer = await episode.say("abc", "length")
            assert answer.messages == ({"role": "user", "content": "cba"},)
            assert (answer.reward, answer.notes) == (0.5, {"turns": turn})
        answer = await episode.say(call("abc"), "stop")
        assert (answer.is_over, answer.reward, answer.final) == (True, 0.5, None)
        assert (answer.num_calls, answer.calls) == (0, ())  # what looks like a call is the text of a turn


async def test_a_coroutine_has_the_conversation_in_its_hands(tmp_path: Path) -> None:
    async with processes({"c": game(write(tmp_path, GAMES), "converse")}) as pool:
        for num_turns, final in ((1, {"score": -1.0, "why": "cut"}), (2, {"score": -1.0, "why": "cut"}), (3, None)):
            episode = pool.begin("c", {"question": "What?"}, seed=9)
            assert contents(await episode.start()) == ["What?"]
            for _ in range(min(num_turns, 2)):
                answer = await episode.say(call("seven77"), "stop")
                assert (contents(answer), answer.reward, answer.notes["seed"]) == (["7"], 0.75, 9.0)
            answer = await (episode.end() if final else episode.say("last", "stop"))
            assert answer.is_over
            assert answer.final == (final or {"score": 2.0})


FAILING = """
import asyncio, os, time
from environments.chat import Step

class Failing:
    def __init__(self, where): self.where = where
    def reset(self, **row):
        self._fail("reset")
        if self.where == "gym": return "begin", {}
    def _fail(self, here):
        if self.where == here: raise KeyError("oh\\nno")
        if self.where == here + " hang": time.sleep(1000)
        if self.where == here + " leave": os._exit(4)
        if self.where == here + " late": self.where = here
    def step(self, text):
        self._fail("step")
        if self.where == "tuple": return "your move", 1.0, True
        if self.where == "number": return Step(5)
        return Step("x", reward=float("nan")) if self.where == "nan" else "5"
    def get_reward(self):
        self._fail("get_reward")
        return {"acc": 1} if self.where == "no score" else 1
    def close(self): self._fail("close")

async def converse(chat, row):
    if row["where"] == "silent": return 1
    turn = await chat.turn()
    if row["where"] == "raise": raise KeyError("oh no")
    if row["where"] == "big": return {"score": 1, "big": 10**400}
    if row["where"] == "exit": raise SystemExit(2)
    if row["where"] == "hang": time.sleep(1000)
    if row["where"] == "wait": await asyncio.sleep(1000)
    if row["where"] == "role": await chat.turn({"role": "system", "content": "x"})
    if row["where"] == "text": await chat.turn("x")
    if row["where"] == "long": await chat.turn({"role": "user", "content": "x" * 2_000_000})
"""


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("reset", "reset: KeyError: 'oh\\nno'"),
        ("reset hang", "reset: it took longer than 2 s"),
        ("reset leave", "it ended its process with code 4"),
        ("step", "step: KeyError: 'oh\\nno'"),
        ("step hang", "step: it took longer than 2 s"),
        ("step leave", "it ended its process with code 4"),
        ("get_reward", "get_reward: KeyError: 'oh\\nno'"),
        ("no score", "the environment's dict has no 'score', only acc"),
        ("nan", "the environment returned nan, which is not a finite number"),
        ("tuple", "step: expected a text or a Step, got tuple: ('your move', 1.0, True)"),
        ("number", "step: expected a text or a Step, got a Step with the text 5"),
        ("gym", "reset: expected None, a text or a Step, got tuple: ('begin', {})"),
    ],
)
async def test_an_environment_that_fails_ends_its_conversation_only(tmp_path: Path, where: str, expected: str) -> None:
    path = write(tmp_path, FAILING)
    environments = {"f": game(path, "Failing", where=where), "good": game(path, "Failing", where="")}
    async with processes(environments, tool_format=None) as pool:
        good = await started(pool, "good")
        episode = pool.begin("f", {}, 1)
        answer = await episode.start()
        while not answer.is_over:
            answer = await (episode.end() if where in ("get_reward", "no score") else episode.say("a", "stop"))
        assert expected in answer.lost
        assert str(path) in answer.lost or "environments.f" in answer.lost
        assert (f"Failing of {path}, line " in answer.lost) == ("KeyError" in expected)
        assert await reply(good, "a") == ["5"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("raise", "KeyError: 'oh no'"),
        ("exit", "RuntimeError: SystemExit: 2"),
        pytest.param(
            "hang",
            "for more than 2 s (rollout.multi_turn.timeout_s) it let nothing else run",
            marks=pytest.mark.extended,
        ),
        ("wait", "it took longer than 2 s"),
        ("role", "expected messages with role 'user' or 'tool'"),
        ("text", "expected messages with role 'user' or 'tool' and a text as content, got x"),
        ("long", "a message has 2,000,000 characters, expected a text of at most 1 MiB"),
    ],
)
async def test_a_coroutine_that_fails_ends_its_conversation_only(tmp_path: Path, where: str, expected: str) -> None:
    path = write(tmp_path, FAILING)
    async with processes({"c": game(path, "converse")}) as pool:
        episode, good = await started(pool, "c", where=where), await started(pool, "c", where="")
        answer = await episode.say("a", "stop")
        assert answer.is_over
        assert expected in answer.lost
        assert (", line " in answer.lost) == (where in ("raise", "role", "text", "long"))
        assert (await good.say("a", "stop")).is_over


async def test_a_coroutine_that_never_asks_for_a_turn_has_failed(tmp_path: Path) -> None:
    async with processes({"c": game(write(tmp_path, FAILING), "converse")}) as pool:
        answer = await pool.begin("c", {"where": "silent"}, 1).start()
    assert answer.lost.endswith("it ended without asking for a turn")


BRIDGE = """
import asyncio, threading, time

async def converse(chat, row):
    loop = asyncio.get_running_loop()

    def ask(*messages):
        return asyncio.run_coroutine_threadsafe(chat.turn(*messages), loop).result().text

    def play():
        return ask() + ask({"role": "user", "content": "go on"}) + str(row["name"])

    text = await chat.run(play)
    return {"score": len(text), "text": text}
"""


async def test_threads_that_wait_for_the_model_hinder_no_other_conversation_and_take_no_time(tmp_path: Path) -> None:
    num_talks = 100  # more than the threads that may work at the same time
    environment = {"path": write(tmp_path, BRIDGE), "name": "converse"}
    async with processes({"bridge": environment}, timeout_s=1.0) as pool:
        talks = [await started(pool, "bridge", name=number) for number in range(num_talks)]
        await asyncio.sleep(1.2)  # the model takes longer than the environment may
        for talk in reversed(talks):
            assert contents(await talk.say("a", "stop")) == ["go on"]
        finals = [(await talk.say("b", "stop")).final for talk in talks]
    assert [final and final["text"] for final in finals] == [f"ab{number}" for number in range(num_talks)]


async def test_a_number_that_no_float_can_hold_is_kept_as_text(tmp_path: Path) -> None:
    async with processes({"c": game(write(tmp_path, FAILING), "converse")}) as pool:
        answer = await (await started(pool, "c", where="big")).say("a", "stop")
    assert answer.final == {"score": 1.0, "big": hex(10**400)}


@pytest.mark.extended
async def test_two_thousand_conversations_are_open_at_once(tmp_path: Path) -> None:
    async with processes({"r": game(write(tmp_path, GAMES), "Reversed")}, num_workers=2, timeout_s=60.0) as pool:
        episodes = [await started(pool, "r") for _ in range(2000)]
        answers = await asyncio.gather(*(one.say(f"{place:04d}", "stop") for place, one in enumerate(episodes)))
        assert [contents(answer) for answer in answers] == [[f"{place:04d}"[::-1]] for place in range(2000)]


FIELDS = """
from environments.chat import Step

class All:
    def reset(self, **row):
        return ",".join(sorted(row))

    def step(self, text):
        return Step("x", info={"self": 1})

class Some:
    def reset(self, *, seed):
        return "some"

    def step(self, text):
        return "x"
"""


@pytest.mark.parametrize(
    ("name", "told", "notes"), [("All", "data_source,name,seed", {"self": 1.0}), ("Some", "some", {})]
)
async def test_fields_of_any_name_are_passed_on(tmp_path: Path, name: str, told: str, notes: dict[str, float]) -> None:
    path = write(tmp_path, FIELDS)
    async with processes({"g": game(path, name)}) as pool:
        episode = pool.begin("g", {"self": 1, "name": "n", "data_source": "g"}, 1)
        [message] = (await episode.start()).messages
        assert message["content"] == told
        assert (await episode.say("hello", "stop")).notes == notes


PRIVILEGED = '''
import enum, numpy as np

class Hidden:
    def __init__(self, named="self.number"):
        self.named, self.number, self.num_asked = named, 0, 0

    def reset(self, *, seed):
        self.number = seed

    async def privileged(self):
        self.num_asked += 1
        return eval(self.named)

    def look(self) -> str:
        """Looks."""
        return str(self.num_asked)
'''


async def test_an_environment_is_asked_once_after_reset_what_the_critic_alone_may_know(tmp_path: Path) -> None:
    named = "{'number': self.number, 'all': np.float32(0.5), 'e': enum.IntEnum('E', 'A').A, 'half': '\\ud800'}"
    hidden = game(write(tmp_path, PRIVILEGED), "Hidden", named=named)
    for asks in (True, False):
        async with processes({"h": hidden}, asks_privileged=asks) as pool:
            assert [tool["function"]["name"] for tool in pool.schemas_of("h")] == ["look"]
            episode = pool.begin("h", {"data_source": "h", "ground_truth": None}, seed=7)
            first = await episode.start()
            told = {"number": "7", "all": "0.5", "e": "1", "half": "?"}
            assert first == Answer(privileged=told if asks else {})
            answer = await episode.say(call("look"), "stop")
            assert contents(answer) == [str(int(asks))]
            assert answer.privileged == {}


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("['secret']", "expected a mapping of names to texts or numbers, got an object of type list"),
        ("{1: 'secret'}", "expected a mapping of names to texts or numbers, got one with a name that is no text"),
        ("{'x': ['secret']}", "'x': expected a text or a number, got an object of type list"),
        ("{'x': None}", "'x': expected a text or a number, got nothing"),
        ("{'x': True}", "'x': expected a text or a number, got an object of type bool"),
        ("{'x': 'secret' * 2**18}", "of at most 1,048,576 characters in all"),
    ],
)
async def test_what_it_may_not_name_is_one_sentence_without_the_value(
    tmp_path: Path, named: str, sentence: str
) -> None:
    hidden = game(write(tmp_path, PRIVILEGED), "Hidden", named=named)
    async with processes({"h": hidden}, asks_privileged=True) as pool:
        first = await pool.begin("h", {}, seed=7).start()
    assert first.is_over
    assert "Hidden of " in first.lost
    assert "privileged: " in first.lost
    assert sentence in first.lost
    assert "secret" not in first.lost
