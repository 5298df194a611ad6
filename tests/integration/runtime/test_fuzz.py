"""Some inputs of the fuzzer; `make fuzz` sends many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.commands import Role
from tests.fuzz.fuzzer import fuzz
from tests.fuzz.replies import fuzz_replies
from tests.fuzz.services import running


@pytest.mark.parametrize(
    "role", ["actor", *(pytest.param(role, marks=pytest.mark.extended) for role in ("critic", "reward", "rollout"))]
)
def test_a_service_stands_whatever_it_is_sent(role: Role, tmp_path: Path) -> None:
    with running(role, tmp_path) as service:
        outcome = fuzz(service, 1000, seed=1)
    assert outcome.failures == [], str(outcome)
    assert outcome.num_inputs == 1000


def test_replies_that_cannot_be_change_no_conversation(tmp_path: Path) -> None:
    assert fuzz_replies(tmp_path, 500, seed=1) == []
