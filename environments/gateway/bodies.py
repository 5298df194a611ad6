"""Reads the bodies of requests, of which few large ones are in memory at a time, and none holds up other requests."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import Request

from environments.gateway.questions import Refused
from environments.gateway.request_fields import object_of

HAS_KEY = "has_key"  # in a request's state: what is called once a request with a living key waits for the endpoint
MAX_BODY_BYTES = 8 << 20  # the messages of a context have at most 1 MiB, of which JSON may make six times as much
_SMALL_BYTES = 64 << 10  # of a body that is read and parsed at once
_MAX_LARGE = 8  # larger bodies at a time
_MAX_LARGE_OF_KEY = 2
_MAX_VALUES = 200_000  # texts, objects, lists and commas in a body
_BODY_S = 30.0  # until a body is there; the time in line does not count

# A text of JSON, also one without an end, or what begins or divides objects and lists.
_VALUE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[,\[{]', re.DOTALL)
_T = TypeVar("_T")


class Bodies:
    """Reads the bodies of an endpoint's requests; large ones stand in line, each key with few of them at a time."""

    def __init__(self) -> None:
        self._large = asyncio.Semaphore(_MAX_LARGE)
        self._large_of_key = WeakValueDictionary[str, asyncio.Semaphore]()
        self._parser = ThreadPoolExecutor(1)

    async def read(self, request: Request, key: str, make: Callable[[Mapping[str, Any], int], _T]) -> _T:
        """Returns what `make` makes of a body's JSON object and its number of bytes; the body itself is not kept.

        Raises:
            Refused: it is too large, does not come, or is no JSON object; or `make` refuses it.
        """
        if int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:
            raise _too_large()
        body = bytearray()
        stream = request.stream()
        if await _extend(body, stream, _SMALL_BYTES):
            return make(object_of(body), len(body))
        tell_connection(request)
        of_key = self._large_of_key.setdefault(key, asyncio.Semaphore(_MAX_LARGE_OF_KEY))
        async with of_key, self._large:
            if not await _extend(body, stream, MAX_BODY_BYTES):
                raise _too_large()
            return await asyncio.get_running_loop().run_in_executor(self._parser, _parse, body, make)


def tell_connection(request: Request) -> None:
    """Tells the connection of a request that a program with a living key waits there."""
    has_key = request.scope.get("state", {}).get(HAS_KEY)
    if has_key is not None:
        has_key()


async def _extend(body: bytearray, stream: AsyncIterator[bytes], num_bytes: int) -> bool:
    """Reads on until a body is there, or has more than so many bytes (False); Refused: that takes too long."""
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in stream:
                body += chunk
                if len(body) > num_bytes:
                    return False
    except TimeoutError as error:
        raise Refused(408, "request_timeout", f"the body was not there after {_BODY_S:g} s") from error
    return True


def _parse(body: bytearray, make: Callable[[Mapping[str, Any], int], _T]) -> _T:
    """Reads a large body in a thread, in steps that are short because a body with many values is refused before."""
    for number, _ in enumerate(_VALUE.finditer(body)):
        if number >= _MAX_VALUES:
            raise Refused(413, "request_too_large", f"expected a body with at most {_MAX_VALUES:,} values")
    return make(object_of(body), len(body))


def _too_large() -> Refused:
    return Refused(413, "request_too_large", f"expected a body of at most {MAX_BODY_BYTES >> 20} MiB")
