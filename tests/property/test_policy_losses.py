"""Properties of every policy loss, also of a user's: split, padding and order of rows do not matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from services.actor.losses.actor_loss import actor_loss
from services.engine.batching.mini_batches import plan_mini_batches
from services.engine.batching.packing import MicroBatchLimits, collate
from splitppo.batch import Batch
from splitppo.config import ActorConfig
from splitppo.config.sections.models import LossAggMode
from splitppo.config.subsections.policy_loss import LOSS_MODES
from tests.support.engines import CPU, MAX_RESPONSE, prepared

OWN = """
def own(tokens, config):
    weight = tokens.row_mean(tokens.log_ratio).exp()
    return -tokens.advantages * weight * tokens.log_probs, {"weight": weight}
"""
LIMITS = MicroBatchLimits(packed=True, max_tokens=100_000)


@pytest.fixture(scope="module")
def own_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "losses.py"
    file.write_text(OWN)
    return file


def make_experience(seed: int, num_rows: int) -> Batch:
    """Ragged rows with holes in the mask, some empty and some of which no token counts; one token counts."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, num_rows)
    lengths[0] = 3
    mask = [rng.random(length) > 0.3 for length in lengths]
    mask[0][0] = True
    log_probs = [-rng.exponential(1.0, length) for length in lengths]
    return Batch.from_rows(
        prompts=[rng.integers(3, 50, rng.integers(1, 6)) for _ in lengths],
        responses=[rng.integers(3, 50, length) for length in lengths],
        response_mask=mask,
        rollout_log_probs=log_probs,  # those of the policy in training
        old_log_probs=[row + rng.normal(0, 0.4, len(row)) for row in log_probs],
        ref_log_probs=[row + rng.normal(0, 0.4, len(row)) for row in log_probs],
        # Some of them the same on many tokens, so that covariances are equal.
        advantages=[rng.normal(size=length) if rng.random() > 0.5 else np.full(length, 0.5) for length in lengths],
        seeds=[[int(rng.integers(2**62))] for _ in lengths],
        mini_batches=[[0]] * num_rows,
    )


def loss_of_parts(
    config: ActorConfig, batch: Batch, parts: list[NDArray[np.int64]], *, packed: bool
) -> tuple[float, dict[int, NDArray[np.float64]], dict[str, float]]:
    """(loss, gradient by row, metrics) of a mini-batch, added up over parts of its rows as over ranks."""
    [mini_batch] = plan_mini_batches(batch, config, LIMITS, MAX_RESPONSE, CPU)
    total, metrics = 0.0, dict[str, float]()
    gradients: dict[int, NDArray[np.float64]] = {}
    for rows in parts:
        tokens = collate(batch.take(rows), mini_batch.weights[rows], MicroBatchLimits(packed, 1), device=CPU).tokens
        log_probs = tokens.columns["rollout_log_probs"].double().requires_grad_()
        output = actor_loss(config)({"log_probs": log_probs, "entropy": log_probs.exp()}, tokens)
        [gradient] = torch.autograd.grad(output.loss, log_probs)
        total += output.loss.item()
        if len(rows):  # else a dummy has stood for them
            of_rows = np.split(gradient.numpy(), batch["responses"].take(rows).offsets[1:-1])
            gradients |= dict(zip(rows.tolist(), of_rows, strict=True))
        for name, values_N in output.token_values.items():
            metrics[name] = metrics.get(name, 0.0) + values_N[tokens.mask].double().sum().item()
    return total, gradients, metrics


def relative_error(actual: dict[int, Any], expected: dict[int, Any]) -> float:
    difference, whole = (
        np.concatenate([actual[row] - expected[row] for row in expected]),
        np.concatenate(list(expected.values())),
    )
    return float(np.linalg.norm(difference) / max(np.linalg.norm(whole), 1e-12))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_rows=st.integers(1, 12),
    cuts=st.lists(st.integers(0, 12), max_size=5),
    loss_mode=st.sampled_from([*LOSS_MODES, "own"]),
    agg_mode=st.sampled_from(get_args(LossAggMode)),
    reinforce_is=st.sampled_from([None, "token", "sequence"]),
    rollout_rs=st.sampled_from([None, "token_k2", "seq_max_k2"]),
    packed=st.booleans(),
)
# A part with fewer tokens than rows, by a loss and a rejection over rows.
@example(5190, 11, [6, 8], "gspo", "token-mean", None, None, False)
@example(5190, 11, [6, 8], "vanilla", "token-mean", None, "seq_max_k2", False)
def test_micro_batches_ranks_padding_and_the_order_of_rows_change_no_loss(
    own_file, seed, num_rows, cuts, loss_mode, agg_mode, reinforce_is, rollout_rs, packed
) -> None:
    shares = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "kl_cov_ratio": 0.2}
    config = ActorConfig.model_validate(
        {
            "model": "unused",
            "loss_agg_mode": agg_mode,
            "entropy_coeff": 0.01,
            "use_kl_loss": True,
            "policy_loss": {
                "loss_mode": loss_mode,
                "custom_path": str(own_file),
                "reinforce_is": reinforce_is,
                "rollout_rs": rollout_rs,
                "rollout_rs_threshold": None if rollout_rs is None else 0.02,
                **shares,
            },
        }
    )
    batch = make_experience(seed, num_rows)
    order = np.random.default_rng(seed).permutation(num_rows)
    bounds = sorted(min(cut, num_rows) for cut in cuts)

    loss, gradients, metrics = loss_of_parts(config, prepared(config, batch), [np.arange(num_rows)], packed=True)
    shuffled = prepared(config, batch.take(order))
    parts = np.split(np.arange(num_rows), bounds)  # some of them without a row
    other, of_places, other_metrics = loss_of_parts(config, shuffled, parts, packed=packed)

    assert abs(other - loss) <= 1e-6 * max(abs(loss), 1.0)
    of_rows = {int(order[place]): gradient for place, gradient in of_places.items()}
    assert relative_error({row: of_rows[row] for row in gradients}, gradients) <= 1e-6
    assert other_metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        assert abs(other_metrics[name] - value) <= 1e-5 * max(1.0, abs(value)), name


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), num_rows=st.integers(1, 8), loss_mode=st.sampled_from([*LOSS_MODES, "own"]))
def test_what_stands_outside_the_mask_changes_no_policy_loss(own_file, seed, num_rows, loss_mode) -> None:
    section = {"loss_mode": loss_mode, "custom_path": str(own_file), "clip_cov_lb": 0.0, "reinforce_is": "sequence"}
    config = ActorConfig.model_validate({"model": "unused", "policy_loss": section})
    batch, rng = make_experience(seed, num_rows), np.random.default_rng(seed)
    inside = batch["response_mask"].values != 0
    changed = batch
    for name in ("rollout_log_probs", "old_log_probs", "advantages"):
        column = batch[name]
        noise = rng.normal(size=len(column.values)).astype(np.float32)
        values = np.where(inside, column.values, noise)
        changed = changed.merge(Batch(num_rows, {name: type(column)(values, column.lengths)}))

    whole = [np.arange(num_rows)]
    loss, gradients, _ = loss_of_parts(config, prepared(config, batch), whole, packed=True)
    other, other_gradients, _ = loss_of_parts(config, prepared(config, changed), whole, packed=True)

    assert other == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert relative_error(other_gradients, gradients) <= 1e-9
