"""What is a repeat of a request, and what is another question; in which order questions are asked."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import openai
import pytest

from environments.chat import Chat
from environments.gateway.chat_completions import read
from environments.gateway.dialogue import Dialogue
from environments.gateway.line import Exchange
from environments.gateway.questions import Answered, Outcome, Question, Refused
from environments.gateway.session import Gateway
from environments.messages import Answer
from environments.pool import what_was_said
from tests.support.groups import wait_until
from tests.support.scripted_policy import ScriptedPolicy

USER = {"role": "user", "content": "2+3?"}
DEADLINE_S = 60.0


def asked(*contents: str) -> Question:
    """A question with these texts, of the user and of the assistant in turn."""
    roles = ["user", "assistant"] * len(contents)
    return read({"messages": [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]})


def listen(dialogue: Dialogue, question: Question, *, is_retry: bool = False) -> tuple[Exchange, object]:
    """Sends a request, whose connection stays."""
    exchange = dialogue.take(question, is_retry=is_retry)
    listener = object()
    exchange.listeners.add(listener)
    return exchange, listener


async def tell(exchange: Exchange, listener: object) -> str:
    """Waits for an answer as a connection does, and returns its text."""
    outcome: Outcome = await exchange.outcome
    exchange.leave(listener, is_told=True)
    assert isinstance(outcome, Answered)
    return outcome.text


async def ask(dialogue: Dialogue, question: Question, *, is_retry: bool = False) -> str:
    return await tell(*listen(dialogue, question, is_retry=is_retry))


async def test_an_equal_question_is_another_question() -> None:
    policy = ScriptedPolicy()
    dialogue = Dialogue(policy.chat, "")
    assert [await ask(dialogue, asked("a")) for _ in range(3)] == ["turn 1", "turn 2", "turn 3"]
    more = asked("a", "turn 2", "b")
    assert [await ask(dialogue, more) for _ in range(2)] == ["turn 4", "turn 5"]
    told = [(answer.begins_context, answer.after_turn) for answer in policy.answers]
    assert told == [(True, None), (True, None), (True, None), (False, 2), (False, 2)]


async def test_a_retry_is_told_the_latest_answer() -> None:
    policy = ScriptedPolicy()
    dialogue = Dialogue(policy.chat, "")
    assert await ask(dialogue, asked("a"), is_retry=True) == "turn 1"  # its first try never arrived
    assert await ask(dialogue, asked("a")) == "turn 2"
    assert await ask(dialogue, asked("a"), is_retry=True) == "turn 2"
    assert await ask(dialogue, read({"messages": [{"role": "user", "content": "a"}], "max_tokens": 3})) == "turn 3"


async def test_who_asks_again_after_a_broken_connection_joins_and_the_others_do_not() -> None:
    policy = ScriptedPolicy()
    policy.is_free.clear()
    dialogue = Dialogue(policy.chat, "")
    (first, _), (second, its_listener) = listen(dialogue, asked("a")), listen(dialogue, asked("a"))
    assert first is not second
    second.leave(its_listener, is_told=False)
    again, listener = listen(dialogue, asked("a"))
    assert again is second
    policy.is_free.set()
    assert await tell(again, listener) == "turn 2"
    assert await ask(dialogue, asked("a")) == "turn 3"


async def test_a_request_is_asked_although_its_connection_breaks() -> None:
    policy = ScriptedPolicy()
    dialogue = Dialogue(policy.chat, "")
    exchange, listener = listen(dialogue, asked("a"))
    exchange.leave(listener, is_told=False)
    await exchange.outcome
    assert await ask(dialogue, asked("a")) == "turn 1"
    assert len(policy.answers) == 1


async def test_a_program_that_is_started_again_is_told_what_was_said_in_order() -> None:
    policy = ScriptedPolicy()
    dialogue = Dialogue(policy.chat, "")
    questions = [asked("a"), asked("a"), asked("a", "turn 2", "b"), asked("a")]
    before = [await ask(dialogue, question) for question in questions]
    policy.is_free.clear()
    listen(dialogue, asked("c"))  # the program ends while it waits
    for _ in range(2):
        dialogue.restarted()
        assert [await ask(dialogue, question) for question in questions] == before
    waiting = listen(dialogue, asked("c"))
    policy.is_free.set()
    assert await tell(*waiting) == "turn 5"
    assert len(policy.answers) == 5
    assert await ask(dialogue, asked("a")) == "turn 6"


async def test_overlapping_requests_are_asked_in_order_of_arrival_and_counted() -> None:
    policy = ScriptedPolicy(lambda answer, _: f"{answer.messages[0]['content']}!")
    dialogue = Dialogue(policy.chat, "")
    exchanges = [listen(dialogue, asked(text)) for text in "cab"]
    assert [await tell(*one) for one in reversed(exchanges)] == ["b!", "a!", "c!"]
    assert [answer.messages[0]["content"] for answer in policy.answers] == list("cab")
    await ask(dialogue, asked("d"))
    assert [answer.num_overlapping for answer in policy.answers] == [2, 0, 0, 0]


async def test_a_repeated_conversation_asks_what_overlaps_in_the_order_of_before() -> None:
    def speak(answer: Answer, _turns: int) -> str:
        return f"{answer.messages[-1]['content']}!"

    policy = ScriptedPolicy(speak)
    dialogue = Dialogue(policy.chat, "")
    first = [*"ab", "a"]
    for one in [listen(dialogue, asked(text)) for text in first]:
        await tell(*one)
    then = [asked("b", "b!", "c"), asked("a", "a!", "c"), asked("b", "b!", "d")]
    for one in [listen(dialogue, question) for question in then]:
        await tell(*one)
    again = ScriptedPolicy(speak)
    again.chat.told = [replace(answer, messages=tuple(map(dict, answer.messages))) for answer in policy.answers]
    repeated = Dialogue(again.chat, "")
    telling = [asyncio.create_task(ask(repeated, asked(text))) for text in "ba"]
    assert await asyncio.gather(*telling) == ["b!", "a!"]
    later = [asyncio.create_task(ask(repeated, question)) for question in reversed(then)]
    assert await ask(repeated, asked("a")) == "a!"
    assert await asyncio.gather(*later) == ["d!", "c!", "c!"]
    assert list(map(what_was_said, again.answers)) == list(map(what_was_said, policy.answers))


async def test_a_program_that_does_not_repeat_itself_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("environments.gateway.line._ORDER_S", 0.01)
    policy = ScriptedPolicy()
    policy.chat.told = [Answer(messages=({"role": "user", "content": "a"},), begins_context=True, tools=())]
    assert await ask(Dialogue(policy.chat, ""), asked("b")) == "turn 1"


async def test_requests_beyond_a_number_are_to_come_later() -> None:
    policy = ScriptedPolicy()
    policy.is_free.clear()
    dialogue = Dialogue(policy.chat, "")
    for number in range(512):
        listen(dialogue, asked(str(number)))
    with pytest.raises(Refused, match="512 requests of this conversation wait already"):
        listen(dialogue, asked("one more"))
    dialogue.close()


def test_a_coroutine_and_a_program_say_the_same_to_the_policy() -> None:
    """The messages of a coroutine that is written by hand, beside those of the same program by its client."""

    async def converse(chat: Chat) -> None:
        turn = await chat.restart(USER, tools=())
        while turn.number < 4:
            turn = await chat.turn({"role": "user", "content": f"after {turn.text}"})

    async def program(gateway: Gateway, chat: Chat) -> None:
        endpoint = gateway.session(chat).endpoint
        messages: list[Any] = [USER]
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            for _ in range(4):
                answer = await client.chat.completions.create(model=endpoint.model, messages=messages)
                text = answer.choices[0].message.content
                messages += [answer.choices[0].message, {"role": "user", "content": f"after {text}"}]

    async def both() -> tuple[list[Any], list[Any]]:
        by_hand, by_client = ScriptedPolicy(), ScriptedPolicy()
        await converse(by_hand.chat)
        gateway = await Gateway.open("127.0.0.1", 0)
        await program(gateway, by_client.chat)
        await gateway.close()
        return by_hand.answers, by_client.answers

    by_hand, by_client = asyncio.run(both())
    assert by_hand == by_client


async def test_a_client_that_loses_patience_and_tries_again_changes_nothing(gateway: Gateway) -> None:
    policy = ScriptedPolicy()
    policy.is_free.clear()
    session = gateway.session(policy.chat)
    endpoint = session.endpoint
    options: Any = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "timeout": 0.2, "max_retries": 100}
    async with openai.AsyncOpenAI(**options) as client:
        answering = asyncio.create_task(client.chat.completions.create(model="m", messages=[USER]))
        await session.began.wait()
        [[exchange]] = session._dialogue._exchanges.values()
        for state, what in ((True, "the end of a connection"), (False, "a retry"), (True, "the end of the retry")):
            await asyncio.to_thread(wait_until, lambda state=state: exchange.is_owed is state, DEADLINE_S, what)
        policy.is_free.set()
        answer = await answering
    assert answer.choices[0].message.content == "turn 1"
    assert len(policy.answers) == 1


async def test_a_program_that_vanishes_is_told_when_it_comes_back(gateway: Gateway) -> None:
    policy = ScriptedPolicy()
    policy.is_free.clear()
    session = gateway.session(policy.chat)
    endpoint = session.endpoint
    options: Any = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "max_retries": 0}
    async with openai.AsyncOpenAI(**options) as client:
        vanishing = asyncio.create_task(client.chat.completions.create(model="m", messages=[USER]))
        await session.began.wait()
        vanishing.cancel()
        [[exchange]] = session._dialogue._exchanges.values()
        await asyncio.to_thread(wait_until, lambda: exchange.is_owed, DEADLINE_S, "the end of a connection")
        policy.is_free.set()
        answers = [await client.chat.completions.create(model="m", messages=[USER]) for _ in range(2)]
    assert [answer.choices[0].message.content for answer in answers] == ["turn 1", "turn 2"]
