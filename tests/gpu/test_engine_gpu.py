"""The engine on one CUDA device: bf16 compute through FSDP2, packed rows through the varlen kernel."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from services.engine import parallel
from services.engine.frozen_model import FrozenModel
from services.engine.model.adapters import trained_parameters
from services.engine.model.linear import fp32_product
from services.engine.optimizer import MOMENTS, BucketedAdamW
from services.engine.train_engine import TrainEngine
from splitppo.config import ActorConfig
from splitppo.config.sections.models import CriticConfig
from tests.support.engines import MAX_RESPONSE, forward_of, gradients, loss_of, make_batch, relative_error, silent
from tests.support.models import save_policy
from tests.support.seeds import shifted

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda", 0)
BATCH = make_batch(24, num_mini_batches=2)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy", hidden_size=128, intermediate_size=256)


def engine_of(folder: Path, kind="policy", **settings) -> TrainEngine:
    section = ActorConfig if kind == "policy" else CriticConfig
    config = section.model_validate({"model": str(folder), "ppo_max_token_len_per_gpu": 256, **settings})
    return TrainEngine(config, kind=kind, seed=1, max_response_length=MAX_RESPONSE, device=DEVICE)


def test_packing_is_the_default(policy: Path) -> None:
    assert engine_of(policy).limits.packed


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_fp32_packed_gradient_equals_padded(policy: Path, kind) -> None:
    packed, padded = (engine_of(policy, kind, use_remove_padding=packing) for packing in (True, False))
    assert relative_error(gradients(packed, BATCH), gradients(padded, BATCH)) <= 1e-5


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_bf16_varlen_gradient_is_as_near_to_fp32_as_padded_bf16(policy: Path, kind) -> None:
    exact = gradients(engine_of(policy, kind, use_remove_padding=False), BATCH)
    errors = [
        relative_error(gradients(engine_of(policy, kind, dtype="bf16", use_remove_padding=packing), BATCH), exact)
        for packing in (True, False)
    ]
    assert errors[0] <= max(0.05, 2 * errors[1])


def test_bf16_varlen_log_probs_are_near_fp32(policy: Path) -> None:
    outputs = {"outputs": ["log_probs"], "progress": silent}
    exact = engine_of(policy).compute(BATCH, forward_of("policy"), **outputs)["log_probs"].values
    bf16 = engine_of(policy, dtype="bf16").compute(BATCH, forward_of("policy"), **outputs)["log_probs"].values
    assert np.abs(bf16 - exact).mean() <= 0.05
    frozen = FrozenModel(engine_of(policy, dtype="bf16").config, device=DEVICE)
    reference = frozen.compute(BATCH, forward_of("policy"), **outputs)["log_probs"].values
    np.testing.assert_allclose(reference, bf16, atol=1e-5)


@pytest.mark.parametrize("has_bias", [False, True])
def test_an_fp32_head_has_the_logits_of_a_float64_one(has_bias: bool) -> None:
    hidden, weight, bias = (torch.randn(*shape, device="cuda").bfloat16() for shape in [(3, 7, 64), (500, 64), (500,)])
    found = fp32_product(hidden, weight, bias if has_bias else None)
    expected = hidden.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_selective_checkpointing_changes_no_gradient(policy: Path) -> None:
    plain, selective = (
        gradients(engine_of(policy, dtype="bf16", gradient_checkpointing=how), BATCH) for how in (True, "selective")
    )
    assert all(torch.equal(plain[name], selective[name]) for name in plain)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="torch.compile needs Triton")
def test_compiled_code_changes_a_bf16_gradient_by_rounding(policy: Path) -> None:
    with_code, without = (engine_of(policy, dtype="bf16", compile=switch) for switch in (True, False))
    assert relative_error(gradients(with_code, BATCH), gradients(without, BATCH)) <= 0.1


def test_update_save_and_load_on_the_device(policy: Path, tmp_path: Path) -> None:
    engine = engine_of(policy, dtype="bf16", lr=1e-3, gradient_checkpointing=True)
    metrics = engine.update(BATCH, forward_of("policy"), loss_of("policy"), progress=silent).metrics
    assert metrics["num_skipped_steps"] == 0
    saved = engine.save_checkpoint(tmp_path / "part", b"state", with_hf_model=True)
    digest = engine.compute_weights_digest()
    engine.update(BATCH, forward_of("policy"), loss_of("policy"), progress=silent)
    saved.result(120)
    other = engine_of(policy, dtype="bf16", lr=1e-3)
    assert other.load_checkpoint(tmp_path / "part") == b"state"
    assert other.compute_weights_digest() == digest


def test_generation_after_an_update_uses_the_new_weights(policy: Path) -> None:
    engine = engine_of(policy, dtype="bf16", lr=1e-1)
    tokens = torch.tensor([[5, 6, 7]], device="cuda")
    logits = []
    for _ in range(2):
        with engine.gathered() as model, torch.no_grad():
            logits.append(model(tokens).logits.float())
        engine.update(BATCH, forward_of("policy"), loss_of("policy"), progress=silent)
    assert (logits[0] - logits[1]).abs().max() > 0.1


def test_an_update_on_a_known_gpu_uses_a_share_of_its_peak(policy: Path) -> None:
    engine = engine_of(policy, dtype="bf16")
    metrics = engine.update(BATCH, forward_of("policy"), loss_of("policy"), progress=silent).metrics
    if math.isnan(engine.flops_meter.peak_flops):
        assert "mfu" not in metrics
    else:
        assert 0 < metrics["mfu"] < 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_at_rest_the_device_is_free_of_weights_and_moments(policy: Path, dtype: str, moments: str) -> None:
    keys = {"dtype": dtype, "lr": 1e-3, "optimizer_state_dtype": moments}
    resting = engine_of(policy, **keys, param_offload=True, optimizer_offload=True)
    staying = engine_of(policy, **keys)
    for engine in (resting, staying):
        for _ in range(3):
            engine.update(BATCH, forward_of("policy"), loss_of("policy"), progress=silent)
    assert resting.compute_weights_digest() == staying.compute_weights_digest()
    assert all(copy.is_pinned() for copy in resting.weights.copies.values())
    for state in resting.optimizer.state.values():
        assert all(parallel.local(state[name]).is_pinned() for name in MOMENTS)
    at_rest_bytes = torch.cuda.memory_allocated()
    with resting.weights.awake():
        assert torch.cuda.memory_allocated() - at_rest_bytes >= 4 * resting.num_parameters
    assert torch.cuda.memory_allocated() == at_rest_bytes


@pytest.mark.parametrize(
    "keys", [{"optimizer_offload": True}, {"optimizer_state_dtype": "bf16"}], ids=["offload", "bf16"]
)
def test_a_step_in_buckets_takes_two_of_them_and_repeats_after_a_checkpoint(
    policy: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    engine, bucket_bytes = engine_of(policy, lr=1e-3, **keys), 1 << 16
    parameters, digests = trained_parameters(engine.model), []
    engine.optimizer = BucketedAdamW(parameters, engine.config, seed=1, device=engine.device, bucket_bytes=bucket_bytes)
    step = {"forward": forward_of("policy"), "loss": loss_of("policy"), "progress": silent}
    engine.update(BATCH, **step)
    saved = engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False)
    for _ in range(2):
        engine.update(BATCH, **step)
        digests.append(engine.compute_weights_digest())
        saved.result(60)
        engine.load_checkpoint(tmp_path / "part")
    assert digests[0] == digests[1]
    for weight in parameters.values():
        weight.grad = torch.zeros_like(weight)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine.optimizer.step()
    scalars = 1024 * len(parameters)  # the allocator rounds up, also steps of one number
    assert bucket_bytes // 2 < torch.cuda.max_memory_allocated() - before <= 2 * bucket_bytes + scalars


def test_a_bucketed_step_has_the_bits_of_torch(policy: Path) -> None:
    weights = [torch.randn(size, device="cuda") for size in (7, 100_003, 4096)]
    ends = []
    for keys in ({}, {"optimizer_offload": True}):
        parameters = {f"{weight.numel()}": torch.nn.Parameter(weight.clone()) for weight in weights}
        config = ActorConfig.model_validate({"model": "unused", "lr": 1e-2, **keys})
        optimizer = BucketedAdamW(parameters, config, seed=1, device=DEVICE, bucket_bytes=1 << 16)
        torch.manual_seed(shifted(0))
        for _ in range(20):
            for weight in parameters.values():
                weight.grad = torch.randn_like(weight)
            optimizer.step()
        ends.append([*parameters.values()])
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))
