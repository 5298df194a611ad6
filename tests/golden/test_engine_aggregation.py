"""Loss weights and learning rates worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import get_scheduler, get_wsd_schedule

from services.engine.batching.loss_aggregation import masked_lengths, response_mask, row_weights
from services.engine.batching.packing import MicroBatchLimits, collate
from services.engine.optimizer import learning_rate
from splitppo.batch import Batch
from splitppo.config import ActorConfig

# Three rows of 4, 0 and 2 tokens, of which 3, 0 and 1 count: 4 tokens in 2 sequences.
MASKED = Batch.from_rows(responses=[[7, 7, 7, 7], [], [7, 7]], response_mask=[[1, 0, 1, 1], [], [0, 1]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 4, 0, 1 / 4, 1 / 4, 0, 1 / 4]),
        ("token-sum", [1, 0, 1, 1, 0, 1]),
        ("seq-mean-token-sum", [1 / 2, 0, 1 / 2, 1 / 2, 0, 1 / 2]),
        ("seq-mean-token-mean", [1 / 6, 0, 1 / 6, 1 / 6, 0, 1 / 2]),
        ("seq-mean-token-sum-norm", [1 / 20, 0, 1 / 20, 1 / 20, 0, 1 / 20]),
    ],
)
def test_weights_of_each_aggregation(mode, expected) -> None:
    tokens = masked_lengths(response_mask(MASKED))
    assert tokens.tolist() == [3, 0, 1]
    weights = row_weights(mode, tokens, total_tokens=4, total_sequences=2, scale=10)
    batch = MASKED.merge(Batch.from_rows(prompts=[[1], [2], [3]]))
    micro_batch = collate(batch, weights, MicroBatchLimits(True, 1), device=torch.device("cpu"))
    np.testing.assert_allclose(micro_batch.tokens.weights, expected, rtol=1e-6)


def test_every_response_token_counts_without_a_mask() -> None:
    assert response_mask(MASKED.select(["responses"])).values.tolist() == [1.0] * 6


def test_a_mini_batch_without_counting_tokens_has_finite_weights() -> None:
    weights = row_weights("seq-mean-token-mean", np.zeros(2), total_tokens=0, total_sequences=0, scale=10)
    assert np.isfinite(weights).all()


def rates(steps, *, total_steps: int = 0, **settings) -> list[float]:
    config = ActorConfig.model_validate({"model": "m", "lr": 8.0, **settings})
    return [learning_rate(config, step, total_steps) for step in steps]


def test_warm_up_is_linear_never_zero_and_ends_at_the_peak() -> None:
    assert rates(range(1, 7), lr_warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_constant_without_warm_up_is_the_peak_from_the_first_step() -> None:
    assert rates([1, 2, 1000]) == [8.0, 8.0, 8.0]


def test_linear_decay_begins_at_the_peak_learns_in_its_last_step_and_stays_at_its_floor() -> None:
    settings = {"lr_schedule": "linear", "lr_warmup_steps": 2, "lr_decay_steps": 6, "lr_min_ratio": 0.5}
    assert rates(range(1, 9), **settings) == [4.0, 8.0, 8.0, 7.0, 6.0, 5.0, 4.0, 4.0]


def test_linear_decay_to_zero_spends_no_step_of_the_run_at_zero() -> None:
    assert rates(range(1, 6), lr_schedule="linear", lr_decay_steps=4) == [8.0, 6.0, 4.0, 2.0, 0.0]


def test_cosine_decay_follows_half_a_wave_from_the_peak() -> None:
    expected = [8.0 * 0.5 * (1 + np.cos(np.pi * done / 4)) for done in range(4)] + [0.0]
    np.testing.assert_allclose(rates(range(1, 6), lr_schedule="cosine", lr_decay_steps=4), expected, atol=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_after_the_warm_up_rates_are_those_of_transformers_schedulers(schedule: str) -> None:
    """LambdaLR, which counts finished steps, as verl uses it; of the warm-up nothing is said: theirs begins at 0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=8.0)
    scheduler = get_scheduler(schedule, optimizer, num_warmup_steps=3, num_training_steps=11)
    expected = []
    for _ in range(11):
        expected += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    actual = rates(range(1, 12), lr_schedule=schedule, lr_warmup_steps=3, lr_decay_steps=11)
    np.testing.assert_allclose(actual[3:], expected[3:], rtol=1e-12)
    assert min(actual) > 0.0


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_stable_steps_keep_the_peak_before_the_decay_as_in_wsd(schedule: str) -> None:
    """Warm-up, stable, decay (Hu et al., 2024, MiniCPM, eq. 1), against transformers' schedule and the closed form."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=8.0)
    scheduler = get_wsd_schedule(optimizer, 3, 5, num_stable_steps=4, decay_type=schedule, min_lr_ratio=0.25)
    theirs = [scheduler.lr_lambdas[0](done) * 8.0 for done in range(14)]
    settings = {"lr_warmup_steps": 3, "lr_stable_steps": 4, "lr_decay_steps": 12, "lr_min_ratio": 0.25}
    actual = rates(range(1, 15), lr_schedule=schedule, **settings)
    np.testing.assert_allclose(actual[3:], theirs[3:], rtol=1e-12)
    decay = [1 - k / 5 if schedule == "linear" else (1 + np.cos(np.pi * k / 5)) / 2 for k in range(5)]
    expected = [8.0] * 5 + [8.0 * (0.25 + 0.75 * share) for share in decay] + [2.0, 2.0]
    np.testing.assert_allclose(actual[2:], expected, rtol=1e-12)


@pytest.mark.parametrize(("share", "total_steps", "warmup"), [(0.3, 11, 3), (0.1, 9, 0), (0.29, 100, 28), (1.0, 4, 4)])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_shares_of_the_run_are_the_steps_that_they_come_to_rounded_down(
    schedule: str, share: float, total_steps: int, warmup: int
) -> None:
    """0.29 * 100 is 28.999... in float64, which verl rounds down likewise."""
    steps = range(1, total_steps + 3)
    said = rates(steps, total_steps=total_steps, lr_schedule=schedule, lr_warmup_steps_ratio=share)
    assert said == rates(steps, lr_schedule=schedule, lr_warmup_steps=warmup, lr_decay_steps=total_steps)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_decay_that_ends_in_the_warm_up_still_uses_the_peak(schedule: str) -> None:
    settings = {"lr_schedule": schedule, "lr_warmup_steps": 2, "lr_decay_steps": 1}
    assert rates(range(1, 5), **settings) == [4.0, 8.0, 8.0, 0.0]
