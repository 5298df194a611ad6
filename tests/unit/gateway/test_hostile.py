"""Clients that are slow, broken or many: each is answered or closed in time, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import json
import logging
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from environments.gateway import anthropic_messages, app, bodies, chat_completions, connections, responses
from environments.gateway.questions import Question, Refused
from environments.gateway.session import Gateway, Session
from tests.support.groups import wait_until
from tests.support.scripted_policy import ScriptedPolicy

DEADLINE_S = 60.0
BODY = json.dumps({"messages": [{"role": "user", "content": "2+3?"}]}).encode()


class Peer:
    """A client that writes bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def status(self) -> int:
        """The status of the next answer, whose body is read, too; 0: the connection was closed without one."""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
            lines = head.decode().lower().splitlines()
            length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length:")), 0)
            await self.reader.readexactly(length)
            return int(lines[0].split()[1])
        return 0

    async def is_closed(self) -> bool:
        """Waits until the connection is closed, and returns True."""
        with suppress(ConnectionError):
            while await asyncio.wait_for(self.reader.read(1 << 16), DEADLINE_S):
                pass
        return True


class Peers:
    """Opens clients of one session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.all: list[Peer] = []

    async def send(self, *sent: bytes) -> Peer:
        port = int(self.session.endpoint.base_url.split(":")[2].split("/")[0])
        self.all.append(Peer(*await asyncio.open_connection("127.0.0.1", port)))
        with suppress(ConnectionError):
            for data in sent:
                self.all[-1].writer.write(data)
                await self.all[-1].writer.drain()
        return self.all[-1]

    def request(self, *, key: str | None = None, length: int = len(BODY), more: str = "") -> bytes:
        key = self.session.endpoint.api_key if key is None else key
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n{more}"
        return f"{head}Content-Length: {length}\r\n\r\n".encode()


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Checks that nothing that a client sends is an error of the endpoint's."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.fixture
def policy() -> ScriptedPolicy:
    return ScriptedPolicy()


@pytest_asyncio.fixture
async def peers(gateway: Gateway, policy: ScriptedPolicy) -> AsyncIterator[Peers]:
    made = Peers(gateway.session(policy.chat))
    yield made
    for peer in made.all:
        peer.writer.close()


async def test_a_body_of_100_mb_is_refused_before_it_is_kept(peers: Peers) -> None:
    announced = await peers.send(peers.request(length=100_000_000))
    assert await announced.status() == 413
    chunks = (b"%x\r\n%b\r\n" % (1 << 20, bytes(1 << 20)) for _ in range(100))
    head = peers.request(length=0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunked = await peers.send(head, *chunks, b"0\r\n\r\n")
    assert await chunked.status() == 413
    stranger = await peers.send(peers.request(key="sk-other", length=100_000_000))
    assert await stranger.status() == 401


async def test_the_same_connection_goes_on_after_a_body_that_was_too_large(peers: Peers) -> None:
    peer = await peers.send(peers.request(length=(9 << 20)), bytes(9 << 20))
    assert await peer.status() == 413
    peer.writer.write(peers.request() + BODY)
    assert await peer.status() == 200


async def test_a_client_that_sends_all_before_it_reads_learns_why_it_was_refused(peers: Peers) -> None:
    body = b'{"a": "' + b"x" * (20 << 20) + b'"}'
    for key in (None, "sk-other"):
        head = peers.request(key=key, length=len(body), more="Connection: close\r\n")
        peer = await peers.send(head, body)
        assert await peer.status() == (413 if key is None else 401)
        assert await peer.is_closed()


@pytest.mark.parametrize("values", [b"{},", b"[],", b'"",', b"0,", b'"\\"",'])
async def test_a_body_of_many_values_is_refused_before_it_is_parsed(peers: Peers, values: bytes) -> None:
    body = b'{"metadata": [' + values * 200_000 + b"0]," + BODY[1:]
    assert await (await peers.send(peers.request(length=len(body)), body)).status() == 413


async def test_a_long_text_is_one_value(peers: Peers) -> None:
    text = '[{,"\\\n' * 100_000
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    assert await (await peers.send(peers.request(length=len(body)), body)).status() == 200


async def test_requests_that_wait_keep_their_questions_and_nothing_else(peers: Peers, policy: ScriptedPolicy) -> None:
    policy.is_free.clear()
    tracemalloc.start()
    sent = []
    for number in range(8):
        fields = {**json.loads(BODY), "max_tokens": number + 1, "metadata": "x" * (2 << 20)}
        body = json.dumps(fields).encode()
        sent.append(await peers.send(peers.request(length=len(body)), body))
    del fields, body
    overlapping = partial(wait_until, lambda: policy.chat.pending.num_overlapping == 7, DEADLINE_S, "8 requests")
    await asyncio.to_thread(overlapping)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 4 << 20
    policy.is_free.set()
    assert [await peer.status() for peer in sent] == [200] * 8


async def test_requests_of_one_conversation_that_wait_have_bounded_bytes(peers: Peers, policy: ScriptedPolicy) -> None:
    policy.is_free.clear()
    sent = []
    for number in range(40):
        fields = {"messages": [{"role": "user", "content": str(number) + "x" * 1_000_000}]}
        body = json.dumps(fields).encode()
        sent.append(await peers.send(peers.request(length=len(body)), body))
    statuses = [asyncio.create_task(peer.status()) for peer in sent]
    refused = partial(wait_until, lambda: sum(one.done() for one in statuses) == 7, DEADLINE_S, "7 refusals")
    await asyncio.to_thread(refused)
    policy.is_free.set()
    assert Counter(await asyncio.gather(*statuses)) == {200: 33, 429: 7}


LARGE = b" " * 1_100_000 + BODY


async def test_stalled_uploads_hold_up_their_own_key_alone(gateway: Gateway, peers: Peers) -> None:
    stalled = [await peers.send(peers.request(length=3_000_000), b" " * 1_200_000) for _ in range(8)]
    answers = [asyncio.create_task(peer.status()) for peer in stalled]
    others = Peers(gateway.session(ScriptedPolicy().chat))
    assert await (await others.send(others.request(length=len(LARGE)), LARGE)).status() == 200
    assert not any(answer.done() for answer in answers)
    for answer in answers:
        answer.cancel()


async def test_a_large_body_may_stand_in_line_longer_than_it_may_take(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_BODY_S", 1.5)
    stalled = [await peers.send(peers.request(length=3_000_000), b" " * 1_200_000) for _ in range(4)]
    in_line = await peers.send(peers.request(length=len(LARGE)), LARGE)
    assert [await peer.status() for peer in (*stalled, in_line)] == [408] * 4 + [200]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "9" * 400])
@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_a_number_that_is_not_finite_is_refused_in_a_schema(peers: Peers, path: str, number: str) -> None:
    schema = f'{{"properties": {{"a": {{"default": {number}}}}}}}'
    function = f'{{"name": "f", "parameters": {schema}}}'
    tool = f'{{"type": "function", "name": "f", "function": {function}, "parameters": {schema}}}'
    if path == "messages":
        tool = f'{{"name": "f", "input_schema": {schema}}}'
    body = f'{{"input": "x", "tools": [{tool}], {BODY.decode()[1:]}'.encode()
    head = peers.request(length=len(body)).replace(b"chat/completions", path.encode())
    assert await (await peers.send(head, body)).status() == 400


@pytest.mark.parametrize("kept_alive", [False, True])
async def test_half_a_head_is_closed_after_a_time(
    peers: Peers, kept_alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.2)
    peer = await peers.send(*([peers.request() + BODY] if kept_alive else []))
    if kept_alive:
        assert await peer.status() == 200
    peer.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: ")
    assert await peer.is_closed()


async def test_half_a_body_is_told_after_a_time(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_BODY_S", 0.1)
    peer = await peers.send(peers.request() + BODY[:10])
    assert await peer.status() == 408
    assert await peer.is_closed()


async def test_half_a_body_whose_sender_vanishes_is_no_error(peers: Peers, policy: ScriptedPolicy) -> None:
    peer = await peers.send(peers.request() + BODY[:10])
    peer.writer.close()
    assert await (await peers.send(peers.request() + BODY)).status() == 200
    assert len(policy.answers) == 1


@pytest.mark.parametrize(
    "garbage",
    [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"x" * 200_000, b"\r\n" * 50_000],
)
async def test_what_is_no_http_is_refused(peers: Peers, garbage: bytes) -> None:
    peer = await peers.send(garbage + b"\r\n\r\n")
    assert await peer.status() in (0, 400)
    assert await peer.is_closed()
    assert await (await peers.send(peers.request() + BODY, garbage)).status() == 200


async def test_pipelined_requests_are_answered_one_after_the_other(peers: Peers, policy: ScriptedPolicy) -> None:
    peer = await peers.send((peers.request() + BODY) * 100 + b"nonsense\r\n\r\n")
    assert [await peer.status() for _ in range(101)] == [200] * 100 + [400]
    assert len(policy.answers) == 100


async def test_of_too_many_connections_those_that_wait_for_an_answer_stay(
    peers: Peers, policy: ScriptedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 20)
    policy.is_free.clear()
    waiting = await peers.send(peers.request() + BODY)
    await peers.session.began.wait()
    idle = await asyncio.gather(*(peers.send() for _ in range(200)))
    closing = [asyncio.create_task(peer.is_closed()) for peer in idle]
    await asyncio.to_thread(
        wait_until, lambda: sum(one.done() for one in closing) == 181, DEADLINE_S, "the closed ones"
    )
    policy.is_free.set()
    assert await waiting.status() == 200
    assert await (await peers.send(peers.request() + BODY)).status() == 200
    for one in closing:
        one.cancel()


async def test_who_reads_nothing_holds_up_nobody(gateway: Gateway) -> None:
    policy = ScriptedPolicy(lambda *_: "x" * 900_000)
    peers = Peers(gateway.session(policy.chat))
    for _ in range(5):
        await peers.send((peers.request() + BODY) * 10)
    reading = await peers.send(peers.request() + BODY)
    assert await reading.status() == 200
    for peer in peers.all:
        peer.writer.transport.abort()


@pytest.mark.parametrize("path", ["/", "/v1/chat/completions", "/v1/../v1/models", "/v1/models?x=%ff", "/\\"])
@pytest.mark.parametrize("method", ["GET", "PUT", "OPTIONS", "HEAD", "CONNECT"])
async def test_other_pages_and_methods_are_refused(peers: Peers, path: str, method: str) -> None:
    peer = await peers.send(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert await peer.status() in (0, 400, 401, 404, 405)
    assert await peer.is_closed()


NAMES = (
    *("messages", "role", "content", "type", "text", "tool_calls", "id", "function", "name", "arguments", "tools"),
    *("tool_call_id", "parameters", "properties", "input_schema", "input", "instructions", "call_id", "output"),
    *("system", "max_tokens", "stop", "tool_use_id", "tool_choice", "n", "stop_sequences", "description", "\ud800"),
)
WORDS = (
    "user",
    "assistant",
    "tool",
    "system",
    "text",
    "function",
    "tool_use",
    "tool_result",
    "message",
    "\ud800",
    "{}",
)
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(WORDS))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)),
    max_leaves=20,
)


def read(api: app.Api, fields: dict[str, Any]) -> Question | Refused:
    try:
        return api.read(fields)
    except Refused as refused:
        return refused


@given(st.dictionaries(st.sampled_from(NAMES), values))
def test_whatever_a_request_says_it_is_a_question_or_one_sentence(fields: dict[str, Any]) -> None:
    for api in (chat_completions, anthropic_messages, responses):
        outcome = read(api, fields)
        if isinstance(outcome, Refused):
            assert outcome.status in (400, 422)
            assert "\n" not in str(outcome)
        else:
            assert all(isinstance(message["content"], str) for message in outcome.messages)
            assert len(outcome.key) == 32
