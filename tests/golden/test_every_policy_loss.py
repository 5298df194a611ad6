"""Every policy loss, aggregation and KL estimate against float64 references that loop over the tokens.

The references are those of tests/support/policy_losses.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from services.actor.losses.actor_loss import actor_loss
from services.actor.losses.registry import POLICY_LOSSES
from services.engine.batching.mini_batches import plan_mini_batches
from services.engine.batching.packing import MicroBatchLimits, collate
from splitppo.batch import Batch
from splitppo.config import ActorConfig
from splitppo.config.section import KlEstimator
from splitppo.config.sections.models import LossAggMode
from splitppo.config.subsections.policy_loss import COVARIANCE_LOSSES, LOSS_MODES
from splitppo.config.subsections.rejection import REJECTION_OPTIONS
from tests.support.engines import CPU, MAX_RESPONSE, prepared
from tests.support.policy_losses import (
    CLIP,
    HIGH,
    LOW,
    REFERENCES,
    SCALE,
    Row,
    aggregated,
    bounded,
    clipped_surrogate,
    dppo,
    gpg,
    is_kept,
    kl,
)
from tests.support.seeds import shifted

pytestmark = pytest.mark.promise("estimators and losses")

Array = NDArray[np.float64]


def make_experience(seed: int, lengths: list[int]) -> Batch:
    """Rows with holes in the mask; of the one before the last no token counts. Numbers stand outside of the mask, too.

    Probabilities move far enough that every clip and every threshold acts on some tokens, and those of the second row
    so little that it is always kept.
    """
    rng = np.random.default_rng(shifted(seed))
    log_probs = [-rng.exponential(0.7, length) - 0.01 for length in lengths]
    old = [np.minimum(row + rng.normal(0, 0.5, len(row)), -0.005) for row in log_probs]
    old[1] = log_probs[1] - 0.05
    mask = [(rng.random(length) > 0.3) | (np.arange(length) == length - 1) for length in lengths]
    mask[-2][:] = False
    return Batch.from_rows(
        prompts=[[1, 2]] * len(lengths),
        responses=[[5] * length for length in lengths],
        response_mask=mask,
        rollout_log_probs=log_probs,  # those of the policy in training
        old_log_probs=old,
        ref_log_probs=[row + rng.normal(0, 0.5, len(row)) for row in log_probs],
        advantages=[rng.normal(0, 1, length) for length in lengths],
        seeds=[[int(rng.integers(2**62))] for _ in lengths],
        mini_batches=[[0]] * len(lengths),
    )


BATCH = make_experience(3, [6, 1, 0, 11, 8, 5, 9])


def actor_config(**settings: Any) -> ActorConfig:
    return ActorConfig.model_validate({"model": "unused", "loss_scale_factor": SCALE, **CLIP, **settings})


def computed(config: ActorConfig, batch: Batch) -> tuple[float, Array]:
    """The product's loss of a mini-batch, and its gradient with respect to the log-probs, in float64."""
    [mini_batch] = plan_mini_batches(batch, config, MicroBatchLimits(packed=True, max_tokens=10_000), MAX_RESPONSE, CPU)
    tokens = collate(batch, mini_batch.weights, MicroBatchLimits(True, 1), device=CPU).tokens
    log_probs = tokens.columns["rollout_log_probs"].double().requires_grad_()
    outputs = {"log_probs": log_probs, "entropy": torch.zeros_like(log_probs)}
    loss = actor_loss(config)(outputs, tokens).loss
    [gradient] = torch.autograd.grad(loss, log_probs)
    return loss.item(), gradient.numpy()


def rows_of(batch: Batch) -> list[Row]:
    names = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages")
    log_probs, old, ref, advantages = ([row.astype(float).tolist() for row in batch[name].rows()] for name in names)
    masks = [row.astype(bool).tolist() for row in batch["response_mask"].rows()]
    selected = [[False] * len(row) for row in masks]
    if "selected_tokens" in batch:
        selected = [row.astype(bool).tolist() for row in batch["selected_tokens"].rows()]
    columns = zip(log_probs, log_probs, old, ref, advantages, masks, selected, strict=True)
    return [Row(*columns_of_row) for columns_of_row in columns]


def expected(batch: Batch, mode: str, loss: Callable[[Row, int], float]) -> tuple[float, Array]:
    """The reference's value, and its gradient by finite differences."""
    rows = rows_of(batch)
    masks = [row.mask for row in rows]

    def losses(row: Row) -> list[float]:
        return row.every(lambda t: loss(row, t)) if any(row.mask) else [0.0] * len(row.now)

    parts = [losses(row) for row in rows]
    gradient = []
    for index, row in enumerate(rows):
        for t in range(len(row.now)):
            sides = []
            for step in (1e-6, -1e-6):
                moved = [x + step * (u == t) for u, x in enumerate(row.now)]
                changed = losses(Row(**{**vars(row), "now": moved}))
                sides.append(aggregated(mode, [*parts[:index], changed, *parts[index + 1 :]], masks))
            gradient.append((sides[0] - sides[1]) / 2e-6)
    return aggregated(mode, parts, masks), np.array(gradient)


def compare(config: ActorConfig, batch: Batch, loss: Callable[[Row, int], float]) -> None:
    value, gradient = computed(config, batch)
    expected_value, expected_gradient = expected(batch, config.loss_agg_mode, loss)
    assert value == pytest.approx(expected_value, rel=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-7)
    assert np.abs(gradient).max() > 1e-3


def test_every_loss_has_a_reference() -> None:
    assert {loss_mode for loss_mode, _, _ in REFERENCES.values()} == set(POLICY_LOSSES) == set(LOSS_MODES)


@pytest.mark.parametrize("mode", get_args(LossAggMode))
@pytest.mark.parametrize("name", REFERENCES)
def test_value_and_gradient_of_every_loss_in_every_aggregation(name: str, mode: str) -> None:
    loss_mode, settings, reference = REFERENCES[name]
    shares = {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.05, "kl_cov_ratio": 0.2}
    config = actor_config(loss_agg_mode=mode, policy_loss={"loss_mode": loss_mode, **shares, **settings})
    batch = prepared(config, BATCH)
    assert loss_mode not in COVARIANCE_LOSSES or batch["selected_tokens"].values.any()

    compare(config, batch, reference)


@pytest.mark.parametrize(
    ("name", "option"), [*(("vanilla", option) for option in REJECTION_OPTIONS), ("reinforce_by_token", "seq_mean_k1")]
)
def test_what_is_rejected_against_the_policy_in_training_has_no_loss(name: str, option: str) -> None:
    threshold, *bounds = {"seq_max_k1": ("1.2", -math.inf, math.log(1.2))}.get(
        option, ("0.9_1.2", math.log(0.9), math.log(1.2)) if option.endswith("k1") else ("0.02", -math.inf, 0.02)
    )
    other = "token_k3" if option == "token_k2" else "token_k2"
    rejects = {"rollout_rs": f"{option},{other}", "rollout_rs_threshold": f"{threshold},0.2"}
    loss_mode, settings, reference = REFERENCES[name]

    def kept(row: Row, t: int) -> bool:
        return is_kept(row, t, option, *bounds) and is_kept(row, t, other, -math.inf, 0.2)

    counted = [kept(row, t) for row in rows_of(BATCH) for t in range(len(row.now)) if row.mask[t]]
    assert 0 < sum(counted) < len(counted)
    config = actor_config(policy_loss={"loss_mode": loss_mode, **settings, **rejects})
    compare(config, BATCH, lambda row, t: reference(row, t) if kept(row, t) else 0.0)


@pytest.mark.parametrize("mode", get_args(LossAggMode))
@pytest.mark.parametrize("name", get_args(KlEstimator))
def test_value_and_gradient_of_every_kl_estimate_in_every_aggregation(name: str, mode: str) -> None:
    settings = {"use_kl_loss": True, "kl_loss_coef": 0.7, "kl_loss_type": name}
    config = actor_config(loss_agg_mode=mode, policy_loss={"loss_mode": "gpg"}, **settings)

    compare(config, BATCH, lambda row, t: gpg(row, t) + 0.7 * kl(row, t, name))


def test_without_dual_clip_a_token_that_became_likely_is_pushed_down_however_likely() -> None:
    config = actor_config(clip_ratio_c=None)

    compare(config, BATCH, lambda row, t: clipped_surrogate(row.ratio(t), row.advantages[t]))


def test_without_a_largest_weight_dppo_weighs_a_token_by_its_whole_ratio() -> None:
    config = actor_config(clip_ratio_c=None, policy_loss={"loss_mode": "dppo_tv"})

    def whole(row: Row, t: int) -> float:
        return dppo(row, t, abs(math.exp(row.frozen[t]) - math.exp(row.old[t])), largest=math.inf)

    compare(config, BATCH, whole)


@pytest.mark.parametrize("loss_mode", ["gspo", "geo_mean"])
def test_with_one_advantage_per_response_a_sequence_loss_is_that_of_its_ratio(loss_mode: str) -> None:
    """The papers' formula: the mean over responses of a surrogate with one ratio per response."""
    per_row = [[row[0]] * len(row) for row in BATCH["advantages"].rows() if len(row)]
    per_row.insert(2, [])
    batch = BATCH.merge(Batch.from_rows(advantages=per_row))
    config = actor_config(policy_loss={"loss_mode": loss_mode})

    value, _ = computed(config, batch)

    surrogates = []
    for row in rows_of(batch):
        if any(row.mask):
            advantage, d = row.advantages[0], [new - old for new, old in zip(row.now, row.old, strict=True)]
            if loss_mode == "gspo":
                surrogates.append(clipped_surrogate(math.exp(row.mean(d)), advantage))
            else:
                side = min if advantage > 0 else max
                surrogates.append(-advantage * math.exp(row.mean([side(x, bounded(x, -LOW, HIGH)) for x in d])))
    assert config.loss_agg_mode == "seq-mean-token-mean"
    assert value == pytest.approx(sum(surrogates) / len(surrogates), rel=1e-5)


# Which tokens the covariance losses select.


def splitmix(state: int) -> int:
    """Steele et al., 2014, in exact arithmetic."""
    mixed = (state + 0x9E3779B97F4A7C15) % 2**64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
    return mixed ^ (mixed >> 31)


def reference_selection(config: ActorConfig, loss_mode: str, batch: Batch, epoch: int, mini_batch: int) -> set[Any]:
    """(row, place) of the tokens selected of one mini-batch."""
    rows, seeds, section = rows_of(batch), [row[0] for row in batch["seeds"].rows()], config.policy_loss
    assigned = [row[epoch] for row in batch["mini_batches"].rows()]
    tokens = [
        (index, t)
        for index, row in enumerate(rows)
        for t in range(len(row.now))
        if row.mask[t] and assigned[index] == mini_batch
    ]
    mean_old = math.fsum(rows[i].old[t] for i, t in tokens) / len(tokens)
    mean_advantage = math.fsum(rows[i].advantages[t] for i, t in tokens) / len(tokens)
    cov = {(i, t): (rows[i].old[t] - mean_old) * (rows[i].advantages[t] - mean_advantage) for i, t in tokens}
    draw = {(i, t): splitmix(splitmix(splitmix(int(seeds[i])) ^ epoch) ^ t) for i, t in tokens}
    if loss_mode == "kl_cov":
        ordered = sorted(tokens, key=lambda token: (-cov[token], draw[token]))
        return set(ordered[: max(1, int(section.kl_cov_ratio * len(tokens)))])
    between = [token for token in tokens if section.clip_cov_lb < cov[token] < section.clip_cov_ub]
    return set(sorted(between, key=draw.__getitem__)[: max(1, int(section.clip_cov_ratio * len(tokens)))])


@pytest.mark.parametrize("loss_mode", COVARIANCE_LOSSES)
@pytest.mark.parametrize("ratio", [1e-6, 0.2, 1.0])
def test_tokens_are_selected_of_each_mini_batch_of_each_epoch(loss_mode: str, ratio: float) -> None:
    shares = {"clip_cov_ratio": ratio, "kl_cov_ratio": ratio, "clip_cov_lb": 0.02, "clip_cov_ub": 0.9}
    config = actor_config(ppo_epochs=3, policy_loss={"loss_mode": loss_mode, **shares})
    assigned = [[0, 0, 1], [1, 0, 0], [0, 1, 1], [1, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1]]
    batch = BATCH.merge(Batch.from_rows(mini_batches=assigned))

    selected = prepared(config, batch)["selected_tokens"]

    for epoch in range(3):
        found = {
            (index, t)
            for index, row in enumerate(selected.rows())
            for t, of_epochs in enumerate(row.reshape(-1, 3).tolist())
            if of_epochs[epoch]
        }
        wanted = [reference_selection(config, loss_mode, batch, epoch, mini_batch) for mini_batch in range(2)]
        assert found == wanted[0] | wanted[1]
        assert all(wanted)


@pytest.mark.parametrize("loss_mode", COVARIANCE_LOSSES)
def test_a_micro_batch_has_the_tokens_that_were_selected_for_its_epoch(loss_mode: str) -> None:
    config = actor_config(ppo_epochs=40, policy_loss={"loss_mode": loss_mode, "clip_cov_lb": 0.02})
    batch = prepared(config, BATCH.merge(Batch.from_rows(mini_batches=[[0] * 40] * BATCH.num_rows)))

    for epoch in (0, 1, 39):
        tokens = collate(batch, None, MicroBatchLimits(True, 1), device=CPU, epoch=epoch).tokens
        rows = [index for index, row in enumerate(BATCH["responses"].rows()) for _ in row]
        starts = BATCH["responses"].offsets
        found = {(row, index - starts[row]) for index, row in enumerate(rows) if tokens.selected[index]}
        assert found == reference_selection(config, loss_mode, batch.select(BATCH.columns), epoch, 0)
