"""Engines of tiny models, batches and losses for the tests of the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.actor.losses.actor_loss import actor_loss
from services.actor.losses.registry import find_policy_loss
from services.engine import parallel
from services.engine.batching.packing import ResponseTokens
from services.engine.batching.segments import SegmentRows
from services.engine.model.adapters import HEADS, trained_parameters
from services.engine.model.forward import RESPONSE_METHOD, Forward, policy_forward, value_forward
from services.engine.model.loading import build_model, fill_model
from services.engine.model.weight_files import fill
from services.engine.model.weights import Kind
from services.engine.strategies.registry import build_strategy
from services.engine.token_metrics import LossOutput
from services.engine.train_engine import TokenLoss, TrainEngine
from splitppo.batch import Batch, Column
from splitppo.config import ActorConfig
from splitppo.config.sections.models import CriticConfig
from tests.support.seeds import shifted

MAX_RESPONSE = 12
CPU = torch.device("cpu")
# Where tests make engines and roles: a CUDA device in the rehearsal, or by hand on a machine that has one.
DEVICE = torch.device(os.environ.get("SPLITPPO_TEST_DEVICE", "cpu"))


def load_model(name: str, kind: Kind = "policy", **settings: Any) -> Any:
    """Loads a whole model in this process, as an engine does; for the settings see `build_model`."""
    model = build_model(name, kind, **settings)
    build_strategy(DEVICE).shard(model, bf16=False, forward_method=RESPONSE_METHOD)
    fill_model(model, name, kind)
    return model


def make_engine(
    folder: Path, kind: Kind = "policy", *, seed: int = 1, writer_locks: Sequence[Path] = (), **settings: Any
) -> TrainEngine:
    """Returns an engine on `DEVICE`; settings are keys of the actor's or critic's section.

    A new value head, which is 0, gets random weights here, so that values differ from token to token.
    """
    section = ActorConfig if kind == "policy" else CriticConfig
    config = section.model_validate({"model": str(folder), "lr": 1e-2, **settings})
    engine = TrainEngine(
        config, kind=kind, seed=seed, max_response_length=MAX_RESPONSE, device=DEVICE, writer_locks=writer_locks
    )
    draw_new_head(engine, seed)
    return engine


def draw_new_head(engine: TrainEngine, seed: int = 1) -> None:
    """Gives a value head that is 0 random weights, the same ones on any number of ranks; all ranks call it."""
    heads = {name: weight for name, weight in engine.model.named_parameters() if name.startswith(HEADS)}
    with engine.weights.awake(changes=True):
        if any(
            parallel.reduce_array([parallel.local(weight.detach()).abs().sum().item()], DEVICE)
            for weight in heads.values()
        ):
            return
        generator = torch.Generator().manual_seed(seed)
        for name, weight in heads.items():
            fill(weight.detach(), name, 0.02 * torch.randn(weight.shape, generator=generator))


def make_batch(num_rows: int = 10, *, seed: int = 0, num_mini_batches: int = 1, ppo_epochs: int = 1) -> Batch:
    """Returns rows of different lengths, with values, advantages and returns, and with holes in the mask.

    The second row has no response.
    """
    rng = np.random.default_rng(shifted(seed))
    lengths = rng.integers(1, MAX_RESPONSE + 1, num_rows)
    lengths[1] = 0
    prompts = [rng.integers(3, 50, rng.integers(1, 20)) for _ in lengths]
    mask = [(rng.random(length) > 0.2) | (np.arange(length) == 0) for length in lengths]
    mini_batches = [[(row + epoch) % num_mini_batches for epoch in range(ppo_epochs)] for row in range(num_rows)]
    return Batch.from_rows(
        prompts=prompts,
        responses=[rng.integers(3, 50, length) for length in lengths],
        response_mask=mask,
        advantages=[rng.normal(size=length) for length in lengths],
        returns=[rng.normal(size=length) for length in lengths],
        mini_batches=mini_batches,
    )


def with_old_log_probs(batch: Batch, *, seed: int = 5) -> Batch:
    """Adds log-probs of an older policy and a sampling seed for each response to a batch."""
    rng, lengths = np.random.default_rng(shifted(seed)), batch["responses"].lengths
    old = rng.normal(-4.0, 0.5, int(lengths.sum())).astype(np.float32)
    seeds = Column(rng.integers(2**62, size=batch.num_rows), np.ones_like(lengths))
    return batch.merge(Batch(batch.num_rows, {"old_log_probs": Column(old, lengths), "seeds": seeds}))


def with_policy_loss(batch: Batch, loss_mode: str, **settings: Any) -> tuple[Batch, TokenLoss]:
    """Returns a batch as rank 0 prepares it for a policy loss, and this loss; settings as in `make_engine`."""
    section = {"loss_mode": loss_mode, "clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "kl_cov_ratio": 0.2}
    config = ActorConfig.model_validate({"model": "unused", "policy_loss": section, **settings})
    return prepared(config, batch), actor_loss(config)


def prepared(config: ActorConfig, batch: Batch) -> Batch:
    """Returns a batch as rank 0 sends it to ranks, with the column that the policy loss prepares, if any."""
    prepare = find_policy_loss(config, config.policy_loss.loss_mode).prepare
    return batch.merge(Batch(batch.num_rows, {"selected_tokens": prepare(config, batch)})) if prepare else batch


def keep_tokens_of(batch: Batch, row: int) -> Batch:
    """Returns the batch with a mask of the tokens of a single row."""
    lengths = batch["responses"].lengths
    mask = np.repeat(np.arange(batch.num_rows) == row, lengths) & (batch["response_mask"].values != 0)
    return batch.merge(Batch(batch.num_rows, {"response_mask": Column(mask.astype(np.uint8), lengths)}))


def forward_of(kind: Kind) -> Forward:
    """Returns the forward function of a model; for a policy at temperature 0.7."""
    return policy_forward(0.7) if kind == "policy" else value_forward


def loss_of(kind: Kind) -> TokenLoss:
    """Returns a loss: policy gradient with an entropy bonus, or half the squared error of the values."""

    def policy_loss(outputs: Mapping[str, Tensor], tokens: ResponseTokens) -> LossOutput:
        token_loss_N = -tokens.columns["advantages"] * outputs["log_probs"] - 0.1 * outputs["entropy"]
        weighted = {"entropy": (tokens.weights * outputs["entropy"]).sum()}
        return LossOutput((tokens.weights * token_loss_N).sum(), weighted, {"nll": -outputs["log_probs"]})

    def value_loss(outputs: Mapping[str, Tensor], tokens: ResponseTokens) -> LossOutput:
        token_loss_N = 0.5 * (outputs["values"] - tokens.columns["returns"]) ** 2
        return LossOutput((tokens.weights * token_loss_N).sum(), {}, {"vpred_mean": outputs["values"]})

    return policy_loss if kind == "policy" else value_loss


def response_tokens(mask_N: Tensor, weights_N: Tensor, columns: Mapping[str, Tensor]) -> ResponseTokens:
    """Returns response tokens that all belong to the same row."""
    return ResponseTokens(mask_N, weights_N, torch.zeros_like(mask_N, dtype=torch.int64), columns)


def silent(done: int, total: int, phase: str) -> None:
    """Takes a progress report and does nothing."""


def gradients(
    engine: TrainEngine, batch: Batch, loss: TokenLoss | None = None, *, keeps_rows: bool = False
) -> dict[str, Tensor]:
    """Returns the whole gradients of the first mini-batch, by parameter; the default loss is that of `loss_of`."""
    segments = SegmentRows.of(batch).batch
    mini_batch = engine.plan_update(segments, keeps_rows=keeps_rows)[0]
    engine.accumulate_gradients(segments, mini_batch, forward_of(engine.kind), loss or loss_of(engine.kind))
    found = {name: parameter.grad for name, parameter in trained_parameters(engine.model).items()}
    return {name: parallel.full(gradient).clone() for name, gradient in found.items() if gradient is not None}


def weights(engine: TrainEngine) -> dict[str, Tensor]:
    """Returns copies of all whole weights, by parameter."""
    return {name: parallel.full(parameter.detach()).clone() for name, parameter in engine.model.named_parameters()}


def relative_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the largest norm(actual - expected) / norm(expected) of all parameters."""
    assert actual.keys() == expected.keys()
    errors = []
    for name, tensor in expected.items():
        scale = tensor.double().norm()
        error = (actual[name].double() - tensor.double()).norm()
        errors.append(float(error / scale) if scale > 0 else float(error))
    return max(errors)
