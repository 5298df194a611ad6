"""A sentence about a run whose steps all belong to the critic's warm-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from splitppo.config.idle_policy import idle_policy
from tests.support.fake_services import make_config

NOTHING = "so the policy learns nothing"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"warmup_steps": 3}, f"critic.warmup_steps (3) covers all 3 steps of the run, {NOTHING}: lower"),
        ({"warmup_steps": 9}, f"critic.warmup_steps (9) covers all 3 steps of the run, {NOTHING}: lower"),
        (
            {"warmup_steps": 3, "warmup_until": {}},
            f"{NOTHING}, unless critic.warmup_until ends the warm-up before: lower critic.warmup_steps",
        ),
    ],
)
def test_a_warm_up_of_all_steps_is_warned_of(changes: dict[str, Any], sentence: str) -> None:
    keys = {f"critic__{name}": value for name, value in changes.items()}
    assert sentence in str(idle_policy(make_config(Path("run"), run__total_steps=3, **keys)))


@pytest.mark.parametrize(
    "keys",
    [
        {"critic__warmup_steps": 2},
        {"critic__warmup_steps": 3, "run__stop_after_step": 2, "run__total_steps": 4},
        {"critic__warmup_steps": 3, "algorithm__adv_estimator": "reinforce_plus_plus"},
        {"critic__warmup_steps": 3, "evaluation__val_only": True, "data__val_files": ["val.parquet"]},
    ],
)
def test_a_run_with_a_step_for_the_policy_or_without_training_is_not(keys: dict[str, Any]) -> None:
    assert idle_policy(make_config(Path("run"), **{"run__total_steps": 3} | keys)) is None
