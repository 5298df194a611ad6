"""A few of the fuzzer's inputs; `make fuzz` sends many more."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.fuzzer import BOUNDS, fuzz
from tests.integration.shell.conftest import StartToy, token_only


def test_a_service_stands_whatever_it_is_sent(start_toy: StartToy, tmp_path: Path) -> None:
    toy = start_toy(**BOUNDS, security=token_only(tmp_path))
    outcome = fuzz(toy, 2000, seed=1)
    assert outcome.failures == [], str(outcome)
    assert outcome.num_inputs == 2000
