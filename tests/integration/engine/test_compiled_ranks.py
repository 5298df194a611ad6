"""Ranks that divide the weights, or the positions of rows, compute with compiled code what they compute without it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.engines import gradients, make_batch, make_engine, relative_error
from tests.support.models import SIZES, save_random
from tests.support.ranks import RunRanks

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
]
# Rows are longer than the window of every second layer: layers of both kinds have the same class.
WINDOWS = {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Qwen2Config(**{**SIZES, "num_hidden_layers": 2, **WINDOWS})
    return save_random(Qwen2ForCausalLM, config, tmp_path_factory.mktemp("models") / "policy")


def error_of(policy: Path, settings: dict[str, Any]) -> float:
    """Returns the error of a gradient with compiled code, relative to the one without it, on this rank."""
    batch = make_batch(12)
    with_code, without = (make_engine(policy, compile=switch, **settings) for switch in (True, False))
    return relative_error(gradients(with_code, batch), gradients(without, batch))


@pytest.mark.parametrize(
    ("num_ranks", "settings", "bound"),
    [
        (2, {}, 1e-5),
        (2, {"gradient_checkpointing": "selective"}, 1e-5),
        (2, {"strategy": "ddp"}, 1e-5),
        (2, {"ulysses_sequence_parallel_size": 2, "gradient_checkpointing": True}, 1e-5),
        (2, {"dtype": "bf16"}, 0.1),
        (1, {"dtype": "bf16", "lora_rank": 4, "gradient_checkpointing": True}, 0.1),
    ],
)
def test_gradients_of_compiled_code_are_those_without_it(
    run: RunRanks, policy: Path, num_ranks: int, settings: dict[str, Any], bound: float
) -> None:
    assert max(run(num_ranks, error_of, policy, settings)) < bound
