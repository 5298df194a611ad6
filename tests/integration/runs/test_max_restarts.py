"""A run that fails again and again gives up, says why, and leaves no process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import EACH_STEP, Controller, RunFolder, started

pytestmark = pytest.mark.extended


OVERRIDES = ("services.max_restarts=1", "services.restart_backoff_s=0.1", "evaluation.val_before_train=false")


def dying(config: dict[str, Any], role: str, step: int) -> dict[str, Any]:
    """The first start of the group dies at the first token, the second one at the second: each failpoint fires once."""
    return {**config, "debug": {"failpoints": {f"{role}.generate": [{"step": step, "hit": hit} for hit in (1, 2)]}}}


def check_end(controller: Controller, role: str) -> None:
    """Checks that a run whose restarts are spent has ended with a sentence."""
    assert controller.wait() == 1, controller.output
    controller.wait_nothing_is_left()
    assert len(list((controller.folder.path / "failpoints").glob("*.fired"))) == 2
    (error,) = controller.errors
    assert error.startswith(f"error: {role}")
    assert error.endswith("; services.max_restarts (1) recoveries without a new step are spent")
    assert "Traceback" not in controller.output
    assert controller.folder.summary["exit_reason"] == "failed"


def test_a_run_whose_restarts_are_spent_ends_with_1_and_names_role_and_key(
    config: dict[str, Any], tmp_path: Path
) -> None:
    with started(dying(config, "actor", 1), tmp_path / "run", *OVERRIDES) as controller:
        check_end(controller, "actor")
    assert controller.folder.steps == []


def test_a_rollout_group_that_is_lost_too_often_ends_the_run_which_can_be_resumed(
    config: dict[str, Any], completed: Callable[[str, int], RunFolder], tmp_path: Path
) -> None:
    with_group = {**config, "services": {**config["services"], "rollout": {"threads": 1}}}
    config = dying(with_group, "rollout", 3)
    with started(config, tmp_path / "run", *OVERRIDES, EACH_STEP) as controller:
        check_end(controller, "rollout")
    assert controller.folder.steps == [1, 2]
    with started(config, tmp_path / "run", *OVERRIDES, EACH_STEP) as controller:
        folder = controller.complete()
    assert "resumed after step " in controller.output
    assert folder.summary["weights_sha256"] == completed("gather", 1).summary["weights_sha256"]
