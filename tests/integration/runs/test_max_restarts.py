"""A run that fails again and again gives up, says why, and leaves no process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import started

pytestmark = [pytest.mark.slow, pytest.mark.extended]


def test_a_run_whose_restarts_are_spent_ends_with_1_and_names_role_and_key(
    config: dict[str, Any], tmp_path: Path
) -> None:
    # The first start dies at the first token, the second one at the second: each failpoint fires once.
    config = {**config, "debug": {"failpoints": {"actor.generate": [{"step": 1, "hit": hit} for hit in (1, 2)]}}}
    overrides = ("services.max_restarts=1", "services.restart_backoff_s=0.1", "evaluation.val_before_train=false")
    with started(config, tmp_path / "run", *overrides) as controller:
        assert controller.wait() == 1, controller.output
        controller.wait_nothing_is_left()
    assert len(list((tmp_path / "run" / "failpoints").glob("*.fired"))) == 2
    (error,) = controller.errors
    assert error.startswith("error: actor")
    assert error.endswith("; services.max_restarts (1) recoveries without a new step are spent")
    assert "Traceback" not in controller.output
    assert controller.folder.summary["exit_reason"] == "failed"
    assert controller.folder.steps == []
