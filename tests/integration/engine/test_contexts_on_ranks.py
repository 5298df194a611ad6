"""Rows with several contexts on several ranks, which share rows or positions: what one process computes and learns.

The rows of the value model have privileged tokens, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.actor.losses.actor_loss import actor_loss
from services.engine import parallel
from services.engine.batching.segments import SegmentRows
from services.engine.model.weights import Kind
from services.engine.train_engine import TrainEngine
from services.roles.sharding import shard_by_tokens
from splitppo.batch import Batch
from splitppo.config import ActorConfig
from tests.support.engines import forward_of, gradients, loss_of, make_engine, prepared, relative_error, silent
from tests.support.episodes import make_episodes, with_privileged_tokens
from tests.support.models import save_policy
from tests.support.ranks import RunRanks

EPISODES = make_episodes((1, 3, 2, 1, 3, 2, 5, 1))
BATCHES: Mapping[Kind, Batch] = {"policy": EPISODES.batch, "value": with_privileged_tokens(EPISODES).batch}
OUTPUTS: Mapping[Kind, str] = {"policy": "log_probs", "value": "values"}

# One loss of tokens, one of tokens that are selected before, and one of sequences.
LOSSES = ("vanilla", "clip_cov", "gspo")
SELECTION = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0}

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "fsdp": {},
    "ddp": {"strategy": "ddp"},
    "padded": {"use_remove_padding": False},
    "row by row": {"ppo_micro_batch_size_per_gpu": 1},
    "positions shared": {"ulysses_sequence_parallel_size": 2},
    "adapters": {"lora_rank": 4, "lora_alpha": 8},
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy")


def engine_of(policy: Path, kind: Kind, loss_mode: str = "vanilla", **settings: Any) -> TrainEngine:
    if kind == "policy":
        settings["policy_loss"] = {"loss_mode": loss_mode, **SELECTION}
    return make_engine(policy, kind, ppo_max_token_len_per_gpu=24, **settings)


def learned(engine: TrainEngine, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The whole gradient of an update of all ranks' rows; the tokens are selected from all rows before."""
    batch = BATCHES[engine.kind]
    if not isinstance(engine.config, ActorConfig):
        return {name: tensor.numpy() for name, tensor in gradients(engine, batch.take(rows), loss_of("value")).items()}
    batch = prepared(engine.config, batch).take(rows)
    found = gradients(engine, batch, actor_loss(engine.config), keeps_rows=engine.config.policy_loss.looks_at_rows)
    return {name: tensor.numpy() for name, tensor in found.items()}


def rows_of_rank(kind: Kind, together: int) -> np.ndarray:
    """The rows of this rank, which `together` neighbours have."""
    return shard_by_tokens(BATCHES[kind], parallel.num_ranks() // together)[parallel.rank() // together]


def learn(policy: Path, kind: Kind, settings: Mapping[str, Any]) -> dict[str, Any]:
    """On a rank: the outputs of its rows, and the gradient by each loss."""
    rows = rows_of_rank(kind, settings.get("ulysses_sequence_parallel_size", 1))
    made: dict[str, Any] = {"rows": rows}
    for loss_mode in LOSSES if kind == "policy" else ("value",):
        engine = engine_of(policy, kind, loss_mode, **settings)
        made[loss_mode] = learned(engine, rows)
    outputs = engine.compute(BATCHES[kind].take(rows), forward_of(kind), outputs=[OUTPUTS[kind]], progress=silent)
    made["outputs"] = outputs[OUTPUTS[kind]].rows()
    return made


@pytest.mark.parametrize("kind", ["policy", "value"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_compute_and_learn_what_one_does(run: RunRanks, policy: Path, layout: str, kind: Kind) -> None:
    settings = LAYOUTS[layout]
    alone = {name: setting for name, setting in settings.items() if name != "ulysses_sequence_parallel_size"}
    engine = engine_of(policy, kind, **alone)
    expected = engine.compute(BATCHES[kind], forward_of(kind), outputs=[OUTPUTS[kind]], progress=silent)[
        OUTPUTS[kind]
    ].rows()
    ranks = run(2, learn, policy, kind, settings)

    for rank in ranks:
        for row, found in zip(rank["rows"], rank["outputs"], strict=True):
            np.testing.assert_allclose(found, expected[row], rtol=0.0, atol=1e-5)
    for loss_mode in LOSSES if kind == "policy" else ("value",):
        of_one = learned(engine_of(policy, kind, loss_mode, **alone), np.arange(EPISODES.batch.num_rows))
        for rank in ranks:
            found = {name: torch.from_numpy(array) for name, array in rank[loss_mode].items()}
            assert relative_error(found, {name: torch.from_numpy(array) for name, array in of_one.items()}) <= 1e-6


def forwards(policy: Path) -> int:
    """On a rank: how many forwards an update makes that keeps the segments of its rows together."""
    engine = engine_of(policy, "policy")
    [mini_batch] = engine.plan_update(
        SegmentRows.of(EPISODES.batch.take(rows_of_rank("policy", 1))).batch, keeps_rows=True
    )
    return len(mini_batch.micro_batches)


def test_ranks_whose_rows_are_kept_make_equally_many_forwards(run: RunRanks, policy: Path) -> None:
    first, second = run(2, forwards, policy)

    assert first == second > 1
