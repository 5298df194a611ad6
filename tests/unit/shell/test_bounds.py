"""How many calls at a time, how many bytes in all."""

from __future__ import annotations

import pytest

from services.shell.bounds import ByteLimit, CallLimit
from splitppo.rpc.errors import LimitExceeded


def test_a_call_that_ends_makes_room_for_another() -> None:
    limit = CallLimit(2)
    refused = pytest.raises(LimitExceeded, match=r"2 calls at a time \(services.max_calls\)")
    with limit.one(), limit.one(), refused, limit.one():
        pass
    with limit.one():
        pass


def test_what_is_held_and_what_is_coming_count_together() -> None:
    held = [0]
    limit = ByteLimit(100, lambda: held[0])
    limit.reserve(60)
    with pytest.raises(LimitExceeded, match=r"a batch of 50 bytes: 60 of 100 bytes are taken \(services.max_held"):
        limit.reserve(50)
    held[0] = 60
    limit.release(60)
    with pytest.raises(LimitExceeded):
        limit.reserve(41)
    limit.reserve(40)
