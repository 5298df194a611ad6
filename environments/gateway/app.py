"""The routes of the endpoint: finds the conversation of a key, reads the request, and writes what comes of it."""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from environments.gateway import anthropic_messages, chat_completions, responses
from environments.gateway.bodies import Bodies, tell_connection
from environments.gateway.draining import draining
from environments.gateway.keys import Keys
from environments.gateway.line import Exchange
from environments.gateway.questions import MODEL, Answered, Form, Outcome, Question, Refused, bad_request
from environments.gateway.request_fields import form_of
from environments.tool_calls.json_calls import MAX_DEPTH, is_deep
from rewards.returned import score_and_fields

log = logging.getLogger(__name__)

_WRITTEN_WRONGLY = (400, 422)  # the statuses of requests that say what they may not
_CLOSED = 499  # the status of an answer that nobody reads


class Api(Protocol):
    """An API that programs speak: a module that reads its requests, and writes its answers and errors."""

    def read(self, fields: Mapping[str, Any]) -> Question: ...
    def write(self, answered: Answered, form: Form) -> Mapping[str, Any]: ...
    def stream(self, answered: Answered, form: Form) -> Iterator[bytes]: ...
    def error(self, refused: Refused) -> Mapping[str, Any]: ...


def make_app(keys: Keys) -> ASGIApp:
    """Returns the endpoint for these keys, which may come and go."""
    bodies = Bodies()

    def route(path: str, answer: Callable[[Request], Awaitable[Response]], api: Api, method: str = "POST") -> Route:
        return Route(path, partial(_refusing, answer, api), methods=[method])

    apis: Mapping[str, Api] = {
        "/v1/chat/completions": chat_completions,
        "/v1/messages": anthropic_messages,
        "/v1/v1/messages": anthropic_messages,  # Anthropic's clients add /v1 to the address that they are given
        "/v1/responses": responses,
    }
    routes = [
        *(route(path, partial(_answer, keys, api, bodies), api) for path, api in apis.items()),
        route("/v1/models", partial(_models, keys), chat_completions, "GET"),
        route("/v1/reward", partial(_reward, keys, bodies), chat_completions),
    ]
    return draining(Starlette(routes=routes, exception_handlers={HTTPException: _no_such_page}))


async def _refusing(answer: Callable[[Request], Awaitable[Response]], api: Api, request: Request) -> Response:
    """Answers a request, or says in the words of the API why not."""
    try:
        return await answer(request)
    except Refused as refused:
        return _error(api, refused)
    except ClientDisconnect:
        return Response(status_code=_CLOSED)


async def _answer(keys: Keys, api: Api, bodies: Bodies, request: Request) -> Response:
    """Answers a request with what the policy says, at the latest when its connection breaks."""
    key = _key_of(request)
    dialogue = keys.dialogues.get(key)
    if dialogue is None:
        raise _no_such_key("endpoint.api_key")
    try:
        question, form = await bodies.read(request, key, partial(_question_of, api))
    except Refused as refused:
        if refused.status in _WRITTEN_WRONGLY:
            dialogue.refused = refused.sentence
        raise
    dialogue.refused = ""
    _count_ignored(keys.ignored, question)
    exchange = dialogue.take(question, is_retry=_is_retry(request))
    tell_connection(request)
    outcome = await _listen(exchange, request)
    return Response(status_code=_CLOSED) if outcome is None else _response(api, outcome, form)


def _question_of(api: Api, fields: Mapping[str, Any], num_bytes: int) -> tuple[Question, Form]:
    """Reads a request: all that is kept of it while it waits."""
    question = replace(api.read(fields), num_bytes=num_bytes)
    _ = question.prefixes  # made here because a large request is read in a thread
    return question, form_of(fields)


async def _listen(exchange: Exchange, request: Request) -> Outcome | None:
    """Waits for the outcome as one of the listeners; None: the connection broke before it was there."""
    listener = object()
    exchange.listeners.add(listener)
    outcome = None
    try:
        outcome = await _outcome(exchange, request)
    finally:
        exchange.leave(listener, is_told=outcome is not None)
    return outcome


async def _outcome(exchange: Exchange, request: Request) -> Outcome | None:
    """Waits for the outcome; None: the connection broke before it was there."""
    broken = asyncio.create_task(_until_broken(request))
    waits: list[asyncio.Future[Any]] = [exchange.outcome, broken]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)  # the end of a connection may be known at the same moment
        return None if broken.done() else exchange.outcome.result()
    finally:
        broken.cancel()


async def _until_broken(request: Request) -> None:
    """Waits until the connection of a request, whose body has been read, breaks."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _response(api: Api, outcome: Outcome, form: Form) -> Response:
    """Writes an outcome; a stream is written at once, because the whole turn is there."""
    if isinstance(outcome, Refused):
        return _error(api, outcome)
    if form.is_stream:
        return Response(b"".join(api.stream(outcome, form)), media_type="text/event-stream")
    return Response(json.dumps(api.write(outcome, form)), media_type="application/json")


def _error(api: Api, refused: Refused) -> Response:
    """Writes a refusal in the words of the API."""
    headers = {"x-should-retry": "false"} if refused.status == 500 else {}  # clients would ask again by themselves
    if refused.status == 408:
        headers["connection"] = "close"  # the rest of the body may come later
    return Response(json.dumps(api.error(refused)), refused.status, headers, "application/json")


def _key_of(request: Request) -> str:
    """Returns the key of a request: OpenAI's clients and Anthropic's have places of their own for it."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _no_such_key(expected: str) -> Refused:
    return Refused(401, "invalid_api_key", f"no conversation that goes on has this key; expected {expected}")


def _is_retry(request: Request) -> bool:
    """Returns True if the client says that it asks again."""
    count = request.headers.get("x-stainless-retry-count", "")
    return count.isdecimal() and count.strip("0") != ""


def _count_ignored(ignored: Counter[str], question: Question) -> None:
    """Counts the parameters of a request that change nothing, and logs each of them once."""
    for name in question.ignored:
        if not ignored[name]:
            log.info("requests of agents set %s, which is ignored: the configuration of the run decides", name)
        ignored[name] += 1


async def _models(keys: Keys, request: Request) -> Response:
    """Names the one model that there is."""
    if _key_of(request) not in keys.dialogues:
        raise _no_such_key("endpoint.api_key")
    models = [{"id": MODEL, "object": "model", "created": 0, "owned_by": "splitppo"}]
    return Response(json.dumps({"object": "list", "data": models}), media_type="application/json")


async def _reward(keys: Keys, bodies: Bodies, request: Request) -> Response:
    """Takes a reward: a JSON object with `score`."""
    key = _key_of(request)
    take = keys.rewards.get(key)
    if take is None:
        raise _no_such_key("the key of rewards")
    fields = await bodies.read(request, key, lambda fields, _num_bytes: fields)
    try:
        score_and_fields(fields, "the program")
    except (TypeError, ValueError) as error:
        raise bad_request(str(error)) from error
    if is_deep(fields, MAX_DEPTH):
        raise bad_request(f"expected a reward whose fields are nested at most {MAX_DEPTH} deep")
    take(fields)
    return Response(b'{"ok": true}', media_type="application/json")


async def _no_such_page(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    expected = "POST /v1/chat/completions, /v1/messages or /v1/responses, or GET /v1/models"
    refused = Refused(error.status_code, "not_found", f"there is no such page or method; expected {expected}")
    return _error(chat_completions, refused)
