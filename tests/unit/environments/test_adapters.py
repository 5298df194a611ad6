"""Environments of other projects: gymnasium itself, and the messages of an OpenEnv server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from environments.adapters import gymnasium, openenv
from environments.chat import Step
from environments.loading import Loaded, load_environments
from environments.messages import Setup
from splitppo.config.subsections.code import CodeConfig
from splitppo.config.subsections.multi_turn import EnvironmentConfig, MultiTurnConfig
from splitppo.config_error import ConfigError
from tests.support.text_game import NUM_TURNS

LETTERS = "tests.support.text_game:Letters-v0"
LAKE: dict[str, Any] = {"id": "FrozenLake-v1", "render_mode": "ansi", "is_slippery": False}


def load(name: str, kwargs: dict[str, Any], *, is_start: bool = True) -> Loaded:
    config = MultiTurnConfig(environments={"game": EnvironmentConfig(name=name, kwargs=kwargs)})
    return load_environments(Setup(config, None, None, CodeConfig(), is_start), {})["game"]


def refusal(name: str, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load(name, kwargs)
    return str(error.value)


def test_a_text_game_is_a_function_of_its_seed_and_of_what_is_said() -> None:
    def play(seed: int) -> list[Any]:
        game = gymnasium.Adapter(LETTERS)
        told = [game.reset(seed=seed, ground_truth="abc"), *(game.step("word") for _ in range(NUM_TURNS))]
        game.close()
        return told

    told = play(3)
    assert told == play(3) != play(4)
    assert told[0].startswith(" abc")
    assert [(step.reward, step.done, step.info) for step in told[1:]] == [
        (0.25, number == NUM_TURNS, {"length": 4}) for number in range(1, NUM_TURNS + 1)
    ]


def test_a_game_may_end_by_itself_and_thoughts_are_no_action() -> None:
    game = gymnasium.Adapter(LETTERS)
    game.reset(seed=1)
    step = game.step("<think>I had better\n</think>\n\nstop\n")
    assert (step.reward, step.done) == (0.25, True)


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        ("2", "Right"),
        ("0? No: 1.", "Down"),
        ("<think>0</think> 2", "Right"),
        ("RIGHT, then down!", "Down"),
        ("1,2", "Right"),
    ],
)
def test_the_last_name_in_a_turn_is_the_action_of_a_discrete_space(text: str, moved: str) -> None:
    names = [] if any(letter.isdigit() for letter in text) else ["left", "down", "right", "up"]
    game = gymnasium.Adapter(**LAKE, actions=names)
    assert game.reset(seed=1).strip().endswith("HFFG")
    assert game.step(text).text.strip().startswith(f"({moved})")


@pytest.mark.parametrize("text", ["", "go", "4", "12", "1.5", "a1", "-1", "\u22122"])
def test_a_turn_without_an_action_is_told_so_and_moves_nothing(text: str) -> None:
    game = gymnasium.Adapter(**LAKE)
    before = game.reset(seed=1)
    assert game.step(text) == Step("expected one of: 0, 1, 2, 3")
    assert game.step("0").text.splitlines()[1:] == before.splitlines()[1:]


@pytest.mark.parametrize("text", ["\u017ftop", "r\u0131ght"])
def test_letters_that_are_only_like_those_of_a_name_are_no_action(text: str) -> None:
    game = gymnasium.Adapter(**LAKE, actions=["left", "stop", "right", "up"])
    game.reset(seed=1)
    assert game.step(text) == Step("expected one of: left, stop, right, up")


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({}, "missing a required argument: 'id'"),
        ({"id": "Nope-v0"}, "Environment `Nope` doesn't exist."),
        ({"id": "no_module:Nope-v0"}, "No module named 'no_module'."),
        ({"id": "FrozenLake-v1"}, "the observations of FrozenLake-v1 are Discrete(16); expected texts, or a game"),
        ({**LAKE, "actions": ["up"]}, "actions: expected 4 different names for FrozenLake-v1, got ['up']"),
        ({**LAKE, "actions": 4}, "actions: expected 4 different names for FrozenLake-v1, got 4"),
        ({**LAKE, "actions": list("abcA")}, "actions: expected 4 different names for FrozenLake-v1, got ['a', 'b', "),
        (
            {**LAKE, "actions": ["a", "b", "c", " "]},
            "actions: expected 4 different names for FrozenLake-v1, got ['a', 'b', ",
        ),
        ({**LAKE, "make": 3}, "make: expected module:function, got 3"),
        ({**LAKE, "make": "no_module:make"}, "No module named 'no_module'"),
        ({"id": LETTERS, "size": 3}, "Letters"),
    ],
)
def test_a_game_that_cannot_be_played_in_text_is_refused(kwargs: dict[str, Any], sentence: str) -> None:
    assert refusal("gymnasium", **kwargs).startswith(
        f"key 'rollout.multi_turn.environments.game.kwargs': gymnasium: {sentence}"
    )


SCHEMA = {"action": {"properties": {"metadata": {}, "guess": {}}}, "observation": {"properties": {"text": {}}}}
WRONG = {"type": "int_parsing", "loc": ["guess"], "msg": "Input should be a valid integer", "input": "x"}


def answer(message: Mapping[str, Any]) -> dict[str, Any]:
    """Answers a message as OpenEnv's server does: the number to be guessed is the seed."""
    content = message["data"]
    if message["type"] == "reset":
        text = json.dumps(content)
        return {"type": "observation", "data": {"observation": {"text": text}, "reward": None, "done": False}}
    if content["guess"] == "x":
        return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [WRONG]}}
    if content["guess"] == "!":
        return {"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}}
    if content["guess"] == "vague":
        return {"type": "error", "data": {"message": "no action", "code": "VALIDATION_ERROR"}}
    if content["guess"] == "long":
        return {"type": "error", "data": {"message": "boom\n" * 1000}}
    is_right = content["guess"] == "7"
    return {
        "type": "observation",
        "data": {"observation": {"text": "ok"}, "reward": is_right / 2, "done": is_right or "false"},
    }


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """The address of a server that speaks OpenEnv's protocol; without the path /ws it closes a session's connection."""

    async def session(connection: ServerConnection) -> None:
        async for message in connection:
            if '"?"' in str(message):
                return
            await connection.send(json.dumps(answer(json.loads(message))))

    def describe(connection: ServerConnection, request: Request) -> Response | None:
        return connection.respond(HTTPStatus.OK, json.dumps(SCHEMA)) if request.path == "/schema" else None

    async with serve(session, "127.0.0.1", 0, process_request=describe) as server:
        [socket] = server.sockets
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"


async def test_a_session_has_rewards_an_end_and_refused_actions(url: str) -> None:
    game = openenv.Adapter(url + "/", "guess", "text")
    assert json.loads(await game.reset(seed=7, ground_truth="abc")) == {"seed": 7, "ground_truth": "abc"}
    assert await game.step("3") == Step("ok")
    assert await game.step("x") == Step("guess: Input should be a valid integer")
    assert await game.step("vague") == Step("action: no action")
    assert await game.step("<think>3</think>\n7") == Step("ok", 0.5, done=True)
    await game.close()


async def test_an_action_may_be_a_json_object_and_an_observation_is_one(url: str) -> None:
    game = openenv.Adapter(url, action_field=None)
    assert await game.reset(seed=7) == '{"text": "{\\"seed\\": 7}"}'
    assert (await game.step("seven")).text == "expected an action as a JSON object, got: seven"
    for written in ("[" * 100_000, "[" * 200 + "]" * 200, "[NaN, 1]", '["\\ud800"]'):
        told = (await game.step(written)).text
        assert told == f"expected an action as a JSON object, got: {written}"
    assert (await game.step('{"guess": ')).text == 'expected an action as a JSON object, got: {"guess":'
    assert await game.step('{"guess": "7"}') == Step('{"text": "ok"}', 0.5, done=True)
    await game.close()


async def test_a_server_that_fails_or_is_gone_is_a_failure_of_the_environment(url: str) -> None:
    game = openenv.Adapter(url, "guess")
    await game.close()
    await game.reset(seed=7)
    with pytest.raises(RuntimeError, match=rf"^{url} says EXECUTION_ERROR: boom$"):
        await game.step("!")
    with pytest.raises(RuntimeError, match=rf"^{url} says None: boom boom [bom ]*$") as told:
        await game.step("long")
    assert "\n" not in str(told.value)
    with pytest.raises(ConnectionClosed):
        await game.step("?")
    await game.close()
    with pytest.raises(OSError, match=r"Connect call failed|refused"):
        await openenv.Adapter("http://127.0.0.1:1").reset(seed=1)


async def test_a_server_must_be_there_at_the_start_and_know_the_fields(url: str) -> None:
    def check(**kwargs: Any) -> str:
        return refusal("openenv", **kwargs).removeprefix("key 'rollout.multi_turn.environments.game.kwargs': openenv: ")

    def refused() -> list[str]:
        return [
            check(),
            check(url="http://127.0.0.1:1"),
            check(url="somewhere"),
            check(url=f"{url}/elsewhere", action_field="guess"),
            check(url=url),
            check(url=url, action_field="guess", observation_field="txt"),
        ]

    told = await asyncio.to_thread(refused)
    starts = [
        "missing a required argument: 'url'",
        "no OpenEnv server answers at http://127.0.0.1:1: ",
        "no OpenEnv server answers at somewhere: ",
        f"no OpenEnv server answers at {url}/elsewhere: ",
        "action_field: expected one of metadata, guess, got 'message'",
        "observation_field: expected one of text, got 'txt'",
    ]
    assert all(sentence.startswith(start) for sentence, start in zip(told, starts, strict=True)), told
    assert all("\n" not in sentence for sentence in told)


def test_a_server_need_not_be_there_when_a_process_is_replaced() -> None:
    assert load("openenv", {"url": "http://127.0.0.1:1"}, is_start=False).name == "openenv"
