"""How many calls at a time."""

from __future__ import annotations

import pytest

from services.runtime.rpc.limits import CallLimit
from splitppo.rpc.errors import LimitExceeded


def test_a_call_that_ends_makes_room_for_another() -> None:
    limit = CallLimit(2)
    refused = pytest.raises(LimitExceeded, match=r"2 calls at a time \(services.max_calls\)")
    with limit.one(), limit.one(), refused, limit.one():
        pass
    with limit.one():
        pass
