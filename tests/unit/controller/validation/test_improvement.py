"""The best validation so far, and the number of worse ones after which a run ends."""

from __future__ import annotations

import math

import pytest

from controller.validation.improvement import Stagnation, best_after
from splitppo.config import ConfigError
from splitppo.config.sections.evaluation import EarlyStopConfig, MetricMode


def best_steps(values: list[float], mode: MetricMode) -> list[int | None]:
    """The best step after each validation, of steps 0, 1, ..."""
    best, found = None, []
    for step, value in enumerate(values):
        best = best_after(best, "val/accuracy", mode, step, {"val/accuracy": value})
        found.append(best.step if best else None)
    return found


def ends(values: list[float], **settings: object) -> list[bool]:
    config = EarlyStopConfig.model_validate({"metric": "val/accuracy", **settings})
    stagnation, found = None, []
    for value in values:
        stagnation = Stagnation.after(stagnation, config, {"val/accuracy": value})
        assert stagnation is not None
        stagnation = Stagnation.model_validate_json(stagnation.model_dump_json())
        found.append(stagnation.ends(config))
    return found


def test_the_best_step_is_the_first_of_equals_and_never_step_0() -> None:
    assert best_steps([9.0, 0.5, 0.7, 0.7, 0.6, 0.8], "max") == [None, 1, 2, 2, 2, 5]
    assert best_steps([0.0, 0.5, 0.7, 0.4, 0.4, math.nan], "min") == [None, 1, 1, 3, 3, 3]
    assert best_steps([0.0, math.nan, math.inf], "max") == [None, None, None]


def test_what_was_best_by_another_metric_or_mode_does_not_count() -> None:
    metrics = {"val/accuracy": 0.5, "val-core/a/acc/mean@1": 0.1}
    before = best_after(None, "val/accuracy", "max", 1, metrics)
    other = best_after(before, "val-core/a/acc/mean@1", "max", 2, metrics)
    assert other is not None
    assert (other.step, other.value) == (2, 0.1)
    turned = best_after(before, "val/accuracy", "min", 3, {"val/accuracy": 0.9})
    assert turned is not None
    assert turned.step == 3


@pytest.mark.parametrize(
    ("values", "settings", "expected"),
    [
        ([0.5, 0.5, 0.5], {"patience": 2}, [False, False, True]),
        ([0.5, 0.4, 0.6, 0.6, 0.6], {"patience": 2}, [False, False, False, False, True]),
        ([0.5, 0.6, 0.7], {"patience": 1, "min_delta": 0.1}, [False, True, False]),
        ([3.0, 2.0, 2.5], {"patience": 1, "mode": "min"}, [False, False, True]),
        ([math.nan, math.nan], {"patience": 2}, [False, True]),
        ([0.5, math.nan, 0.6], {"patience": 2}, [False, False, False]),
    ],
)
def test_a_run_ends_after_so_many_validations_in_a_row_that_were_no_better(
    values: list[float], settings: dict[str, object], expected: list[bool]
) -> None:
    assert ends(values, **settings) == expected


def test_more_patience_lets_a_stopped_run_go_on() -> None:
    stagnation = Stagnation(metric="val/accuracy", mode="max", best=0.5, num_validations=2)
    assert stagnation.ends(EarlyStopConfig(metric="val/accuracy", patience=2))
    assert not stagnation.ends(EarlyStopConfig(metric="val/accuracy", patience=3))
    assert not stagnation.ends(EarlyStopConfig())
    assert stagnation.reason == (
        "stopped early: 2 validations in a row gave no better val/accuracy, which was 0.5 before"
    )


def test_a_metric_that_validation_does_not_give_is_refused_with_those_that_it_gives() -> None:
    metrics = {"val/accuracy": 0.5, "val-core/a/acc/mean@1": 0.1}
    gives = "it gives val-core/a/acc/mean@1, val/accuracy"
    with pytest.raises(ConfigError, match=f"^checkpoint.best_metric: validation gives no 'val-aux/x'; {gives}$"):
        best_after(None, "val-aux/x", "max", 1, metrics)
    with pytest.raises(ConfigError, match=f"^evaluation.early_stop.metric: validation gives no 'val-aux/x'; {gives}$"):
        Stagnation.after(None, EarlyStopConfig(metric="val-aux/x"), metrics)
