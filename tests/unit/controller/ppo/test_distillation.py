"""Which log-probs a teacher's signal compares, and log-probs of a teacher that cannot be used."""

from __future__ import annotations

import numpy as np
import pytest

from controller.ppo.distillation import teacher_signal
from splitppo.batch import Batch, Column
from splitppo.config import ConfigError
from splitppo.config.sections.teacher import TeacherConfig


@pytest.mark.parametrize(("signal", "expected"), [("advantage", -1.0), ("loss", -2.0), ("top_k", -2.0)])
def test_a_signal_in_the_loss_is_measured_by_the_rollout_backends_log_probs(signal: str, expected: float) -> None:
    """Only a step that compares log-probs may have old ones: a check must not change what an adaptive weight sees."""
    rows = {"responses": [[5]], "old_log_probs": [[-2.0]], "rollout_log_probs": [[-1.0]], "teacher_log_probs": [[-3.0]]}
    mask = Column.from_rows([[1]], np.dtype(bool))
    assert teacher_signal(
        TeacherConfig.model_validate({"model": "t", "signal": signal}), Batch.from_rows(**rows), mask
    ).tolist() == [expected]


def test_a_teacher_whose_log_probs_are_not_finite_ends_the_run_with_its_name() -> None:
    rows = {"responses": [[5]], "old_log_probs": [[-2.0]], "teacher_log_probs": [[float("nan")]]}
    with pytest.raises(ConfigError, match=r"^teacher\.model: expected finite log-probs from .*, got nan$"):
        teacher_signal(TeacherConfig(model="t"), Batch.from_rows(**rows), Column.from_rows([[1]], np.dtype(bool)))
