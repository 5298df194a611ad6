"""Ranks that hold a model together, each on a pretended GPU of its own, have the gradient of one rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from services.engine.train_engine import TrainEngine
from splitppo.config import ActorConfig
from tests.support.engines import MAX_RESPONSE, gradients, make_batch, relative_error
from tests.support.models import save_policy
from tests.support.ranks import RunRanks, rank_processes

PRETENDED = "REHEARSAL_LIBRARY" in os.environ
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not PRETENDED, reason="needs the pretended CUDA device: make rehearse-gpu"),
]
MAX_RANKS = 4
BATCH = make_batch(16)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "ddp": (2, {"strategy": "ddp"}),
    "lora": (2, {"lora_rank": 4}),
    "divided positions": (2, {"ulysses_sequence_parallel_size": 2}),
    "replicas": (4, {"fsdp_size": 2}),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RunRanks]:
    with rank_processes(MAX_RANKS, on_gpus=True) as run:
        yield run


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy", num_key_value_heads=2)


def on_rank(policy: Path, keys: dict[str, Any]) -> dict[str, Tensor]:
    """The whole gradients of this rank's share of the rows, on the CPU."""
    settings = {"model": str(policy), "dtype": "bf16", "ppo_max_token_len_per_gpu": 64, **keys}
    config = ActorConfig.model_validate(settings)
    device = torch.device("cuda", torch.cuda.current_device())
    engine = TrainEngine(config, kind="policy", seed=1, max_response_length=MAX_RESPONSE, device=device)
    together = config.ulysses_sequence_parallel_size
    rows = range(dist.get_rank() // together, BATCH.num_rows, dist.get_world_size() // together)
    return {name: gradient.cpu() for name, gradient in gradients(engine, BATCH.take([*rows])).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_have_the_gradient_of_one(ranks: RunRanks, policy: Path, layout: str) -> None:
    num_ranks, keys = LAYOUTS[layout]
    alone = {key: value for key, value in keys.items() if key == "lora_rank"}
    [expected] = ranks(1, on_rank, policy, alone)
    found = ranks(num_ranks, on_rank, policy, keys)
    assert max(relative_error(of_rank, expected) for of_rank in found) <= 0.05
