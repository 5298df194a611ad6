"""Two ranks learn from rows with images what one rank learns, also if one of them has none; nobody waits for ever."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.engine import parallel
from services.engine.model.weights import Kind
from services.engine.strategies import fsdp2
from services.engine.train_engine import TrainEngine
from splitppo.batch import Batch
from tests.support.engines import forward_of, gradients, loss_of, make_engine, relative_error, silent, weights
from tests.support.image_rows import make_image_batch
from tests.support.ranks import RunRanks
from tests.support.vision_models import FAMILIES, save_vision_policy

# The first rank has images in some micro-batches, the second one in none.
ROWS_OF_RANKS = ([(0,), (0,), (1, 2), (), ()], [(), (), ()])
ADAPTERS = {"lora_rank": 4, "lora_alpha": 8}
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "fsdp2": {},
    "fsdp2 in bf16": {"dtype": "bf16"},
    "ddp": {"strategy": "ddp"},
    "ddp in bf16": {"strategy": "ddp", "dtype": "bf16"},
    "checkpointing": {"gradient_checkpointing": True},
    "adapters": ADAPTERS,
    "adapters with ddp": {**ADAPTERS, "strategy": "ddp"},
}
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        save_vision_policy(folder / family, family, num_hidden_layers=3)  # all deepstack features reach a response
    return folder


def batch_of(model: Path) -> Batch:
    """The rows of all ranks, one after the other."""
    return make_image_batch(model, [images for rows in ROWS_OF_RANKS for images in rows])


def engine_of(model: Path, kind: Kind, **settings: Any) -> TrainEngine:
    return make_engine(model, kind, ppo_micro_batch_size_per_gpu=2, **settings)


def arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def tensors(of: Arrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in of.items()}


def learn(model: Path, kind: Kind, settings: Mapping[str, Any], keep_gathered_bytes: int) -> dict[str, Any]:
    """On a rank: the whole gradients of its rows and those of the other one, and an update."""
    first = sum(map(len, ROWS_OF_RANKS[: parallel.rank()]))
    batch = batch_of(model).between(first, first + len(ROWS_OF_RANKS[parallel.rank()]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp2, "KEEP_GATHERED_BYTES", keep_gathered_bytes)
        engine = engine_of(model, kind, **settings)
        facts: dict[str, Any] = {"gradients": arrays(gradients(engine, batch)), "before": arrays(weights(engine))}
        engine.update(batch, forward_of(kind), loss_of(kind), progress=silent)
        facts["after"] = arrays(weights(engine))
        facts["digest"] = engine.compute_weights_digest()
    return facts


@pytest.mark.parametrize("is_frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_one_without_images_learn_what_one_rank_learns(
    run: RunRanks, models: Path, family: str, layout: str, is_frozen: bool
) -> None:
    settings = {"freeze_vision_tower": is_frozen, **LAYOUTS[layout]}
    kind: Kind = "value" if layout == "ddp" else "policy"
    alone = engine_of(models / family, kind, **{**settings, "dtype": "fp32", "strategy": "fsdp2"})
    expected = gradients(alone, batch_of(models / family))
    assert any(".visual." in name for name in expected) != is_frozen
    bound = 0.1 if settings.get("dtype") == "bf16" else 1e-6
    keep_gathered_bytes = 0 if layout == "checkpointing" else fsdp2.KEEP_GATHERED_BYTES
    ranks = run(2, learn, models / family, kind, settings, keep_gathered_bytes)
    for facts in ranks:
        assert relative_error(tensors(facts["gradients"]), expected) <= bound
        for name, before in facts["before"].items():
            learns = name.replace(".default.", ".") in expected
            assert np.array_equal(facts["after"][name], before) != learns, name
    assert ranks[0]["digest"] == ranks[1]["digest"]
