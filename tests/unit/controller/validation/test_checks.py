"""What validation can give: a metric that it cannot give is refused before the run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.preflight import load_inputs
from splitppo.config import ConfigError
from tests.support.model_folders import write_model, write_rows


@pytest.mark.parametrize("key", ["checkpoint__best_metric", "evaluation__early_stop__metric"])
@pytest.mark.parametrize(
    ("metric", "sentence"),
    [
        (
            "val-core/gsm/acc/mean@1",
            "no validation prompt has the data_source of 'val-core/gsm/acc/mean@1'; they have sort_letters",
        ),
        ("val-aux/sort_letters/reward/best@4/mean", "needs 4 responses, but evaluation.n is 2"),
    ],
)
def test_a_metric_that_validation_cannot_give_is_refused(
    tmp_path: Path, make: Any, key: str, metric: str, sentence: str
) -> None:
    val = {"data__val_files": write_rows(tmp_path / "val.jsonl", "sort_letters"), "evaluation__n": 2}
    with pytest.raises(ConfigError, match=f"^{key.replace('__', '.')}: .*{sentence}"):
        load_inputs(make(**val, **{key: metric}))
    for known in ("val/accuracy", "val-core/sort_letters/reward/mean@2", "val-core/sort_letters/reward/best@2/mean"):
        load_inputs(make(**val, **{key: known}))


def test_what_needs_validation_needs_prompts_that_functions_score(tmp_path: Path, make: Any) -> None:
    rm = {"reward_model__model": write_model(tmp_path / "rm", num_labels=1)}
    chat = write_rows(tmp_path / "chat.jsonl", *["hh"] * 4)
    unscored = {"data__train_files": chat, "data__val_files": chat, **rm}
    for setting, key in (
        ({"evaluation__val_only": True}, "evaluation.val_only"),
        ({"checkpoint__best_metric": "val/accuracy"}, "checkpoint.best_metric"),
    ):
        with pytest.raises(ConfigError, match=f"^{key}: .*no validation prompt has a reward function"):
            load_inputs(make(**unscored, **setting))
