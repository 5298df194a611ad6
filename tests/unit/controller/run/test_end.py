"""The conditions under which a run has come to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.run.end import RunEnd
from controller.run.state import RunState
from tests.support.fake_services import make_config, make_prompts


@pytest.mark.parametrize(
    ("step", "refills", "is_reached"),
    [(4, 0, False), (5, 0, True), (4, 1, False), (4, 2, True), (3, 9, True)],
)
def test_a_run_ends_with_its_last_step_or_with_the_last_prompts_of_its_epochs(
    tmp_path: Path, step: int, refills: int, is_reached: bool
) -> None:
    config = make_config(tmp_path, run__total_steps=5, run__total_epochs=2)  # three batches are an epoch
    state = RunState.initial(config).model_copy(update={"step": step, "refills": refills})
    assert RunEnd.of(config, make_prompts(config)).is_reached(state) is is_reached


def test_without_epochs_steps_alone_count(tmp_path: Path) -> None:
    config = make_config(tmp_path, run__total_steps=5)
    state = RunState.initial(config).model_copy(update={"step": 4, "refills": 99})
    assert not RunEnd.of(config, make_prompts(config)).is_reached(state)
