"""LoRA adapters and strategies on one CUDA device: what trains, its precision, its memory, its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from services.engine import parallel
from services.engine.train_engine import TrainEngine
from splitppo.config import ActorConfig
from splitppo.config.sections.models import CriticConfig
from tests.support.engines import MAX_RESPONSE, forward_of, loss_of, make_batch, relative_error, silent
from tests.support.models import save_policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda", 0)
BACKENDS = "cpu:gloo,cuda:nccl"
BATCH = make_batch(24, num_mini_batches=2)
LORA = {"lora_rank": 8, "lora_alpha": 16.0}


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    torch.cuda.set_device(DEVICE)
    dist.init_process_group(BACKENDS, store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy", hidden_size=128, intermediate_size=256)


def engine_of(folder: Path, kind="policy", **settings) -> TrainEngine:
    section = ActorConfig if kind == "policy" else CriticConfig
    keys = {"model": str(folder), "lr": 1e-2, "ppo_max_token_len_per_gpu": 256, **settings}
    return TrainEngine(section.model_validate(keys), kind=kind, seed=1, max_response_length=MAX_RESPONSE, device=DEVICE)


def update(engine: TrainEngine) -> dict[str, float]:
    return engine.update(BATCH, forward_of(engine.kind), loss_of(engine.kind), progress=silent).metrics


def trained_gradients(engine: TrainEngine) -> dict[str, Tensor]:
    """Whole gradients of the first mini-batch, of the parameters that learn."""
    engine.accumulate_gradients(BATCH, engine.plan_update(BATCH)[0], forward_of(engine.kind), loss_of(engine.kind))
    named = engine.model.named_parameters()
    return {name: parallel.full(weight.grad).float().clone() for name, weight in named if weight.requires_grad}


def copies(engine: TrainEngine, *, trained: bool) -> dict[str, Tensor]:
    named = engine.model.named_parameters()
    return {name: parallel.full(weight.detach()).clone() for name, weight in named if weight.requires_grad is trained}


def as_one(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """One vector: the gradients of A are 0 before the first update, and in bf16 nearly so after it."""
    return {"all": torch.cat([gradient.flatten() for _, gradient in sorted(gradients.items())])}


def log_probs(engine: TrainEngine) -> Tensor:
    columns = engine.compute(BATCH, forward_of("policy"), outputs=["log_probs"], progress=silent)
    return torch.from_numpy(columns["log_probs"].values.copy())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_an_update_changes_adapters_and_leaves_the_base_as_it_was(policy: Path, kind, dtype) -> None:
    engine = engine_of(policy, kind, dtype=dtype, **LORA)
    base, trained = copies(engine, trained=False), copies(engine, trained=True)
    assert sum(weight.numel() for weight in trained.values()) < 0.5 * sum(weight.numel() for weight in base.values())
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    update(engine)
    after = copies(engine, trained=False)
    assert all(torch.equal(weight, after[name]) for name, weight in base.items())
    changed = copies(engine, trained=True)
    assert any(not torch.equal(weight, changed[name]) for name, weight in trained.items())


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_the_bf16_gradient_of_adapters_is_near_fp32(policy: Path, kind) -> None:
    bf16, fp32 = (trained_gradients(engine_of(policy, kind, dtype=dtype, **LORA)) for dtype in ("bf16", "fp32"))
    assert relative_error(as_one(bf16), as_one(fp32)) <= 0.1


def test_gradient_checkpointing_changes_no_gradient_of_adapters(policy: Path) -> None:
    plain, again = (
        trained_gradients(engine_of(policy, gradient_checkpointing=switch, **LORA)) for switch in (False, True)
    )
    assert relative_error(as_one(again), as_one(plain)) <= 1e-5


def test_new_adapters_change_no_log_prob_and_trained_ones_do(policy: Path) -> None:
    engine = engine_of(policy, dtype="bf16", **LORA)
    without = log_probs(engine_of(policy, dtype="bf16"))
    assert torch.allclose(log_probs(engine), without, atol=1e-5)
    update(engine)
    assert (log_probs(engine) - without).abs().max() > 1e-2


def test_adapters_are_saved_loaded_and_sampled_with(policy: Path, tmp_path: Path) -> None:
    engine = engine_of(policy, dtype="bf16", **LORA)
    update(engine)
    engine.save_checkpoint(tmp_path / "part", b"state", with_hf_model=True).result(120)
    digest, expected = engine.compute_weights_digest(), log_probs(engine)
    other = engine_of(policy, dtype="bf16", **LORA)
    assert other.load_checkpoint(tmp_path / "part") == b"state"
    assert other.compute_weights_digest() == digest
    assert torch.equal(log_probs(other), expected)
    tokens = torch.tensor([[5, 6, 7]], device=DEVICE)
    logits = []
    for one in (other, engine_of(policy, dtype="bf16", **LORA)):
        with one.gathered() as model, torch.no_grad():
            logits.append(model(tokens).logits.float())
    assert (logits[0] - logits[1]).abs().max() > 1e-2


def test_adapters_take_a_fraction_of_the_memory_of_all_weights(tmp_path: Path) -> None:
    folder = save_policy(tmp_path / "policy", hidden_size=1024, intermediate_size=4096, num_attention_heads=16)
    used = {}
    for rank in (0, 8):
        before = torch.cuda.memory_allocated(DEVICE)
        engine = engine_of(folder, dtype="bf16", lora_rank=rank)
        update(engine)
        used[rank] = torch.cuda.memory_allocated(DEVICE) - before
        del engine
    assert used[8] <= 0.4 * used[0]


@pytest.mark.parametrize("settings", [{}, LORA, {"dtype": "bf16"}, {"dtype": "bf16", **LORA}], ids=str)
def test_strategies_compute_the_same_gradient(policy: Path, settings) -> None:
    ddp, fsdp2 = (trained_gradients(engine_of(policy, strategy=name, **settings)) for name in ("ddp", "fsdp2"))
    assert relative_error(as_one(ddp), as_one(fsdp2)) <= (2e-2 if "dtype" in settings else 1e-5)


def test_a_checkpoint_moves_between_strategies(policy: Path, tmp_path: Path) -> None:
    engine = engine_of(policy, dtype="bf16", strategy="ddp")
    update(engine)
    engine.save_checkpoint(tmp_path / "part", b"state", with_hf_model=False).result(120)
    other = engine_of(policy, dtype="bf16", strategy="fsdp2")
    assert other.load_checkpoint(tmp_path / "part") == b"state"
    assert other.compute_weights_digest() == engine.compute_weights_digest()
