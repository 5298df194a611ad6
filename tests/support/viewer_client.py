"""Asks the viewer's application as a browser would, and as one that means harm would, without a socket."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

from viewer.app import make_app
from viewer.run import Run

TOKEN = "the-token"


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)


async def ask(
    folders: Sequence[Path],
    path: str,
    *,
    method: str = "GET",
    host: str = "localhost:8265",
    token: str | None = TOKEN,
    headers: Mapping[str, str] = {},
    allowed_hosts: Sequence[str] = (),
) -> Answer:
    """Sends one request to an application that shows `folders`; the path is sent as it is written."""
    app = make_app([Run(n, folder) for n, folder in enumerate(folders)], token=TOKEN, allowed_hosts=allowed_hosts)
    return await send_to(app, path, method=method, host=host, token=token, headers=headers)


async def send_to(
    app: ASGIApp,
    path: str,
    *,
    method: str = "GET",
    host: str = "localhost:8265",
    token: str | None = TOKEN,
    headers: Mapping[str, str] = {},
) -> Answer:
    """Sends one request to an application."""
    raw, _, query = path.partition("?")
    sent = {"host": host, **({} if token is None else {"authorization": f"Bearer {token}"}), **headers}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": raw,
        "raw_path": raw.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8265),
    }
    messages: list[Message] = []
    requests: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        return requests.pop() if requests else await asyncio.Future()  # a client that stays

    async def send(message: Message) -> None:
        messages.append(message)

    await app(scope, receive, send)
    found = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
    content = b"".join(message.get("body", b"") for message in messages[1:])
    return Answer(messages[0]["status"], found, gzip.decompress(content) if "content-encoding" in found else content)
