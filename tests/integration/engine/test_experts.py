"""Mixtures of experts on two ranks: how they are loaded, what they learn, and the names under which they leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.loading import Peak, anonymous_mib
from services.engine import parallel
from services.engine.export import export
from services.engine.model import weight_files
from services.engine.model.file_names import FileNames
from services.engine.model.forward import RESPONSE_METHOD
from services.engine.model.loading import build_model, fill_model
from services.engine.model.weights import Kind
from services.engine.strategies import fsdp2
from services.engine.strategies.registry import build_strategy
from services.engine.train_engine import TrainEngine
from services.engine.weights_digest import weights_digest
from splitppo.balance import partition
from tests.support.engines import CPU, forward_of, gradients, loss_of, make_batch, make_engine, relative_error, silent
from tests.support.models import save_experts
from tests.support.ranks import RunRanks, rank_processes

BATCH = make_batch(12)
# 200 MB of weights: what a process frees and takes by itself meanwhile, up to 8 MB, is little beside half of them.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
EXPERTS = {
    "qwen3_moe": {"moe_intermediate_size": 512, "num_experts": 64},
    "mixtral": {"num_local_experts": 64},
}
KINDS: tuple[Kind, ...] = ("policy", "value")
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def run() -> Iterator[RunRanks]:
    with rank_processes(2) as run:
        yield run


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_experts(tmp_path_factory.mktemp("models") / request.param, request.param)


def arrays(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def load(folder: Path) -> tuple[int, str]:
    """On a rank: the memory that loading takes at its peak, without the pages of the files, and the digest."""
    weight_files.PIECE_BYTES = 1 << 20  # little beside this model, as 64 MiB beside a large one
    model = build_model(str(folder), "policy")
    build_strategy(CPU).shard(model, bf16=False, forward_method=RESPONSE_METHOD)
    before, peak = anonymous_mib(), Peak()
    fill_model(model, str(folder), "policy")
    return int((peak.stop() - before) * 2**20), weights_digest(model)


@pytest.mark.parametrize("architecture", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.extended)])
def test_each_of_two_ranks_loads_half_of_the_experts_and_the_same_bits(tmp_path: Path, architecture: str) -> None:
    folder = save_experts(tmp_path, architecture, **WIDE, **EXPERTS[architecture])
    num_bytes = (folder / "model.safetensors").stat().st_size
    with rank_processes(1) as run_alone, rank_processes(2) as run_two:  # new ones: nothing is left of another model
        [(alone, _)], shards = run_alone(1, load, folder), run_two(2, load, folder)
    assert alone >= 0.9 * num_bytes  # what imports have freed is used again
    assert max(peak for peak, _ in shards) <= 0.6 * alone
    whole = weights_digest(AutoModelForCausalLM.from_pretrained(folder))
    assert {digest for _, digest in shards} == {whole}


def learn(folder: Path, checkpoint: Path) -> Facts:
    """On a rank: the gradients of its rows, the whole weights by the names of files, and a checkpoint."""
    costs = (BATCH["prompts"].lengths + BATCH["responses"].lengths).astype(float)
    batch = BATCH.take(partition(costs, parallel.num_ranks())[parallel.rank()])
    facts: Facts = {kind: arrays(gradients(make_engine(folder, kind), batch)) for kind in KINDS}
    with patch.object(fsdp2, "KEEP_GATHERED_BYTES", 0):  # as for a model that is too large to stay gathered
        engine = make_engine(folder)
        facts["large"] = arrays(gradients(engine, batch))
    engine.save_checkpoint(checkpoint, b"state", with_hf_model=False).result(60)
    weights = engine.whole_weights(torch.float32)
    facts["in_files"] = arrays(dict(FileNames.of(engine.model).unstack(weights)))
    return facts


def with_whole_head(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Joins weight and bias of the value head: the terms of the bias, a single sum, cancel each other.

    What is left of it may be 2e-6 off by rounding alone: one rank and two lie on both sides of the sum in float64.
    """
    if "score.bias" not in gradients:
        return gradients
    head = torch.cat([gradients["score.weight"].flatten(), gradients["score.bias"]])
    return {name: tensor for name, tensor in gradients.items() if not name.startswith("score.")} | {"score": head}


def test_two_ranks_learn_what_one_does_and_experts_leave_by_the_names_of_their_files(
    run: RunRanks, folder: Path, tmp_path: Path
) -> None:
    found = run(2, learn, folder, tmp_path / "checkpoint")
    expected = {kind: gradients(make_engine(folder, kind), BATCH) for kind in KINDS}
    stored = load_file(folder / "model.safetensors")
    for facts in found:
        for name, of_one in {**expected, "large": expected["policy"]}.items():
            actual = {weight: torch.from_numpy(array) for weight, array in facts[name].items()}
            assert any(weight.endswith("experts.gate_up_proj") for weight in actual)
            assert relative_error(with_whole_head(actual), with_whole_head(of_one)) <= 1e-6, name
        assert facts["in_files"].keys() == stored.keys()
        assert all(np.array_equal(array, stored[name]) for name, array in facts["in_files"].items())
    export(tmp_path / "checkpoint", tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in exported.items())


def resume(folder: Path, checkpoint: Path, kind: Kind) -> tuple[str, str]:
    """On a rank that divides positions with another one: weights after two updates, and with a checkpoint between."""

    def engine() -> TrainEngine:
        return make_engine(folder, kind, ulysses_sequence_parallel_size=2, gradient_checkpointing="selective")

    def after_update(engine: TrainEngine) -> str:
        engine.update(BATCH, forward_of(kind), loss_of(kind), progress=silent)
        return engine.compute_weights_digest()

    whole = engine()
    after_update(whole)
    whole.save_checkpoint(checkpoint, b"", with_hf_model=False).result(60)
    resumed = engine()
    resumed.load_checkpoint(checkpoint)
    return after_update(whole), after_update(resumed)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_divide_positions_resume_experts_bit_for_bit(
    run: RunRanks, folder: Path, tmp_path: Path, kind: Kind
) -> None:
    found = run(2, resume, folder, tmp_path / "checkpoint", kind)
    assert len({digest for digests in found for digest in digests}) == 1


def test_experts_get_no_adapters_which_is_said_once_and_merged_weights_have_the_names_of_the_base(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        engine = make_engine(folder, lora_rank=4)
    assert sum("experts are stacked, and no linear layers" in line for line in caplog.messages) == 1
    engine.update(BATCH, forward_of("policy"), loss_of("policy"), progress=silent)
    engine.save_checkpoint(tmp_path / "checkpoint", b"", with_hf_model=False).result(60)
    export(tmp_path / "checkpoint", tmp_path / "merged")
    base, merged = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "merged"))
    assert base.keys() == merged.keys()
    changed = {name.split(".")[-2] for name, tensor in merged.items() if not torch.equal(tensor, base[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}
