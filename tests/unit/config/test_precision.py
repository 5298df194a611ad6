"""A sentence about models that compute in fp32 on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from splitppo.config.precision import fp32_on_gpus
from tests.support.fake_services import make_config

GPU, OTHER_GPU = {"devices": [0]}, {"devices": [1]}
BOTH = {"services__actor__devices": [0], "services__critic__devices": [1]}


def warned(**changes: Any) -> list[str]:
    """Returns the keys that the warning names."""
    warning = fp32_on_gpus(make_config(Path("run"), **changes))
    if warning is None:
        return []
    keys, _, reason = warning.partition(": ")
    assert "torch's kernels for both take bf16 alone" in reason
    return keys.split(" and ")


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({}, []),
        (BOTH, ["actor.dtype", "critic.dtype"]),
        ({**BOTH, "actor__dtype": "bf16"}, ["critic.dtype"]),
        ({**BOTH, "actor__dtype": "bf16", "critic__dtype": "bf16"}, []),
        ({"services__critic__devices": [1]}, ["critic.dtype"]),
        ({"services__rollout__devices": [0]}, ["actor.dtype"]),
        ({**BOTH, "services__rollout__devices": [2], "critic__dtype": "bf16"}, ["actor.dtype"]),
        (
            {**BOTH, "actor__dtype": "bf16", "critic__dtype": "bf16", "reward_model__model": "rm"},
            ["reward_model.dtype"],
        ),
    ],
)
def test_the_models_that_compute_in_fp32_on_gpus_are_named(changes: dict[str, Any], keys: list[str]) -> None:
    assert warned(**changes) == keys
