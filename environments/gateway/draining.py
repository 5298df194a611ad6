"""Lets a client read an answer that was there before its request was: what still comes of the request is dropped."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MAX_BYTES = 64 << 20  # of a request that are dropped before its connection may be closed
_SILENCE_S = 2.0  # after which nothing more of it is expected


def draining(app: ASGIApp) -> ASGIApp:
    """Returns an endpoint whose answers end once the whole request has come, or too much of it, or no more.

    A connection that is closed while bytes come is reset, and its client would lose the answer.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = False

        async def receive_and_note() -> Message:
            nonlocal is_whole
            message = await receive()
            is_whole = not message.get("more_body", False)
            return message

        async def send_and_drain(message: Message) -> None:
            if is_whole or message["type"] != "http.response.body" or message.get("more_body", False):
                await send(message)
                return
            await send({**message, "more_body": True})
            num_bytes = 0
            try:
                while not is_whole and num_bytes < _MAX_BYTES:
                    dropped = await asyncio.wait_for(receive_and_note(), _SILENCE_S)
                    num_bytes += len(dropped.get("body", b""))
            except TimeoutError:
                pass
            await send({"type": "http.response.body", "body": b""})

        await app(scope, receive_and_note, send_and_drain)

    return answer
