"""The critic's loss against a float64 reference that loops over the tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.critic.losses import clipped_value_loss, critic_loss
from services.engine.token_metrics import MetricSums, reduce_metrics
from splitppo.config.sections.models import CriticConfig
from tests.support.engines import response_tokens
from tests.support.seeds import shifted

pytestmark = pytest.mark.promise("formulas")


def reference_token(value: float, old: float, target: float, clip_range: float) -> tuple[float, bool]:
    clipped = min(max(value, old - clip_range), old + clip_range)
    plain_error, clipped_error = (value - target) ** 2, (clipped - target) ** 2
    return 0.5 * max(plain_error, clipped_error), clipped_error > plain_error


def test_value_clip_by_hand() -> None:
    # Moved past the range towards the return: the clipped error counts. Away from it, and inside: the plain one.
    values = torch.tensor([1.0, -1.0, 0.2], requires_grad=True)
    old, returns = torch.zeros(3), torch.full((3,), 2.0)

    loss, clipped = clipped_value_loss(values, old, returns, clip_range=0.5)
    loss.sum().backward()

    torch.testing.assert_close(loss.detach(), torch.tensor([0.5 * 1.5**2, 0.5 * 3.0**2, 0.5 * 1.8**2]))
    assert clipped.tolist() == [True, False, False]
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -3.0, -1.8]))


@pytest.mark.parametrize("seed", range(4))
def test_value_loss_equals_the_reference_with_holes_and_an_empty_row(seed: int) -> None:
    rng = np.random.default_rng(shifted(seed))
    num_tokens, empty_row = 40, slice(30, 40)
    mask = rng.random(num_tokens) > 0.3
    mask[empty_row] = False
    weights = np.where(mask, rng.random(num_tokens), 0.0)
    values, old, returns = (np.where(mask, rng.normal(0, 1, num_tokens), 0.0) for _ in range(3))
    config = CriticConfig.model_validate({"model": "unused", "cliprange_value": 0.3})

    columns = {"values": torch.tensor(old).float(), "returns": torch.tensor(returns).float()}
    tokens = response_tokens(torch.tensor(mask), torch.tensor(weights).float(), columns)
    output = critic_loss(config)({"values": torch.tensor(values).float()}, tokens)

    metrics = reduce_metrics([MetricSums.of(output, tokens.mask)])
    expected, num_clipped = 0.0, 0
    for index in np.flatnonzero(mask):
        token, clipped = reference_token(values[index], old[index], returns[index], 0.3)
        expected += weights[index] * token
        num_clipped += clipped
    assert output.loss.item() == pytest.approx(expected, rel=1e-5)
    assert metrics["vf_loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["vf_clipfrac"] == pytest.approx(num_clipped / mask.sum(), rel=1e-6)
    assert metrics["vpred_mean"] == pytest.approx(values[mask].mean(), rel=1e-5)
