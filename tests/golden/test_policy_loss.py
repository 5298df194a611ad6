"""The actor's loss against a float64 reference that loops over the tokens."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from services.actor.losses.actor_loss import actor_loss
from services.actor.losses.clip_losses import vanilla
from services.actor.losses.kl import kl_estimate
from services.actor.losses.policy_loss import PolicyTokens
from services.actor.losses.registry import POLICY_LOSSES
from services.engine.token_metrics import MetricSums, reduce_metrics
from splitppo.config import ActorConfig
from splitppo.config.section import KlEstimator
from splitppo.config.subsections.policy_loss import COVARIANCE_LOSSES, LOSS_MODES
from tests.support.engines import response_tokens
from tests.support.seeds import shifted

pytestmark = pytest.mark.promise("formulas")

Array = NDArray[np.float64]


def config(**values: Any) -> ActorConfig:
    return ActorConfig.model_validate({"model": "unused", **values})


def experience(seed: int, lengths: list[int], hole_rate: float = 0.3) -> dict[str, Array]:
    """Flat tokens of rows with holes in the mask; the last row counts nowhere."""
    rng = np.random.default_rng(shifted(seed))
    num_tokens = sum(lengths)
    mask = rng.random(num_tokens) >= hole_rate
    mask[num_tokens - lengths[-1] :] = False
    log_probs = -rng.exponential(1.0, num_tokens)
    return {
        "log_probs": log_probs,
        "old_log_probs": log_probs + rng.normal(0, 0.5, num_tokens),
        "ref_log_probs": log_probs + rng.normal(0, 0.5, num_tokens),
        "advantages": np.where(mask, rng.normal(0, 1, num_tokens), 0.0),
        "entropy": rng.exponential(1.0, num_tokens),
        "mask": mask,
        "weights": np.where(mask, rng.random(num_tokens), 0.0),
    }


def reference_token(log_prob: float, old: float, advantage: float, low: float, high: float, dual: float) -> float:
    """The token's loss, from the definition: min over the surrogates, a floor for negative advantages."""
    ratio = math.exp(min(max(log_prob - old, -20.0), 20.0))
    objective = min(ratio * advantage, min(max(ratio, 1.0 - low), 1.0 + high) * advantage)
    if advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


def reference_kl(log_prob: float, ref: float, name: str) -> float:
    difference = log_prob - ref
    if name in ("kl", "k1"):
        return difference
    if name == "abs":
        return abs(difference)
    if name in ("mse", "k2"):
        return difference**2 / 2
    k = min(max(-difference, -20.0), 20.0)
    return min(max(math.exp(k) - k - 1.0, -10.0), 10.0)


def tensors(arrays: dict[str, Array], *names: str) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(arrays[name], dtype=torch.float32) for name in names}


def run(cfg: ActorConfig, arrays: dict[str, Array], columns: tuple[str, ...]) -> tuple[float, dict[str, float], Array]:
    """(loss, metrics, gradient with respect to the log-probs)."""
    outputs = tensors(arrays, "log_probs", "entropy")
    outputs["log_probs"].requires_grad_()
    weights_N, mask_N = tensors(arrays, "weights")["weights"], torch.tensor(arrays["mask"])
    output = actor_loss(cfg)(outputs, response_tokens(mask_N, weights_N, tensors(arrays, *columns)))
    output.loss.backward()
    gradient = outputs["log_probs"].grad
    assert gradient is not None
    metrics = reduce_metrics([MetricSums.of(output, mask_N)])
    return output.loss.item(), metrics, gradient.numpy().astype(np.float64)


def clipped(log_probs_N: torch.Tensor, advantages_N: torch.Tensor, **clip: float | None) -> Any:
    """PPO clip where the old log-probs are zero."""
    zeros_N = torch.zeros_like(log_probs_N)
    return vanilla(PolicyTokens(log_probs_N, zeros_N, advantages_N, zeros_N == 0, zeros_N.long()), config(**clip))


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize(("ratio", "expected_factor"), [(1.0, 1.0), (1.1, 1.1), (0.9, 0.9)])
def test_inside_the_clip_range_the_loss_is_minus_ratio_times_advantage(
    advantage: float, ratio: float, expected_factor: float
) -> None:
    loss_N, metrics = clipped(torch.tensor([math.log(ratio)]), torch.tensor([advantage]), clip_ratio=0.2)

    assert loss_N.item() == pytest.approx(-expected_factor * advantage, rel=1e-6)
    assert metrics["pg_clipfrac"].item() == 0.0


def test_clipping_and_dual_clip_by_hand() -> None:
    # advantage 2, ratio 1.5 -> -2 * 1.2; advantage -2, ratio 0.5 -> 2 * 0.8; advantage -2, ratio 5 -> 2 * 3 (dual);
    # advantage 2, ratio 0.5 -> not clipped; advantage -2, ratio 2 -> not clipped, under the dual clip.
    ratios = torch.tensor([1.5, 0.5, 5.0, 0.5, 2.0])
    advantages = torch.tensor([2.0, -2.0, -2.0, 2.0, -2.0])

    loss_N, metrics = clipped(ratios.log(), advantages, clip_ratio=0.2)

    torch.testing.assert_close(loss_N, torch.tensor([-2.4, 1.6, 6.0, -1.0, 4.0]))
    assert metrics["pg_clipfrac"].tolist() == [1, 1, 0, 0, 0]
    assert metrics["pg_clipfrac_lower"].tolist() == [0, 0, 1, 0, 0]


def test_a_higher_upper_clip_lets_the_ratio_rise_further() -> None:
    loss_N, _ = clipped(torch.tensor([1.25]).log(), torch.ones(1), clip_ratio_high=0.28)

    assert loss_N.item() == pytest.approx(-1.25)


@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_a_huge_log_ratio_stays_finite(gap: float) -> None:
    log_probs = torch.tensor([gap], requires_grad=True)
    loss_N, _ = clipped(log_probs, torch.tensor([-1.0]), clip_ratio=0.2)
    loss_N.sum().backward()

    assert torch.isfinite(loss_N).all()
    assert torch.isfinite(log_probs.grad).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_policy_loss_equals_the_reference_with_holes_and_an_empty_row(seed: int) -> None:
    arrays = experience(seed, [7, 1, 12, 5])
    cfg = config(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1.5)

    loss, metrics, _ = run(cfg, arrays, ("old_log_probs", "advantages"))

    expected = kl = clipped = lower = 0.0
    tokens = [index for index in range(len(arrays["mask"])) if arrays["mask"][index]]
    for index in tokens:
        new, old, advantage = (arrays[name][index] for name in ("log_probs", "old_log_probs", "advantages"))
        token = reference_token(new, old, advantage, 0.2, 0.28, 1.5)
        expected += arrays["weights"][index] * token
        kl += old - new
        ratio = math.exp(new - old)
        clipped += (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
        lower += advantage < 0 and ratio > 1.5
    assert loss == pytest.approx(expected, rel=1e-5)
    assert metrics["pg_loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["ppo_kl"] == pytest.approx(kl / len(tokens), rel=1e-4, abs=1e-6)
    assert metrics["pg_clipfrac"] == pytest.approx(clipped / len(tokens), rel=1e-6)
    assert metrics["pg_clipfrac_lower"] == pytest.approx(lower / len(tokens), rel=1e-6)
    assert metrics["entropy"] == pytest.approx(np.mean(arrays["entropy"][arrays["mask"]]), rel=1e-5)


def test_gradient_of_the_policy_loss_equals_finite_differences_of_the_reference() -> None:
    arrays = experience(11, [9, 6])

    _, _, gradient = run(config(), arrays, ("old_log_probs", "advantages"))

    for index in range(len(gradient)):
        old, advantage, weight = (arrays[name][index] for name in ("old_log_probs", "advantages", "weights"))
        new, step = arrays["log_probs"][index], 1e-6
        above, below = (reference_token(new + sign * step, old, advantage, 0.2, 0.2, 3.0) for sign in (1, -1))
        assert gradient[index] == pytest.approx(weight * (above - below) / (2 * step), rel=1e-3, abs=1e-5)


def test_importance_weights_multiply_the_policy_loss_of_a_token_and_nothing_else() -> None:
    arrays = experience(4, [7, 1, 12, 5])
    weights = np.random.default_rng(shifted(4)).uniform(0.0, 2.0, 25)
    arrays["rollout_is_weights"] = np.where(arrays["mask"], weights, 0.0)
    columns = ("old_log_probs", "advantages", "ref_log_probs", "rollout_is_weights")
    settings = {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2}

    loss, metrics, gradient = run(config(**settings), arrays, columns)

    t = {name: torch.tensor(array) for name, array in arrays.items()}
    log_probs = t["log_probs"].clone().requires_grad_()
    ratio = (log_probs - t["old_log_probs"]).exp()
    plain = torch.maximum(-t["advantages"] * ratio, -t["advantages"] * ratio.clamp(0.8, 1.2))
    plain = torch.where(t["advantages"] < 0, torch.minimum(plain, -3.0 * t["advantages"]), plain)
    policy = (t["weights"] * t["rollout_is_weights"] * plain).sum()
    k = t["ref_log_probs"] - log_probs
    expected = policy + (t["weights"] * (0.2 * (k.exp() - k - 1) - 0.1 * t["entropy"])).sum()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["pg_loss"] == pytest.approx(policy.item(), rel=1e-5)
    assert log_probs.grad is not None
    np.testing.assert_allclose(gradient, log_probs.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("with_old", [True, False])
def test_importance_weights_of_one_change_no_bit(with_old: bool) -> None:
    arrays = experience(6, [4, 9])
    arrays["rollout_is_weights"] = np.ones(13)
    columns = ("advantages", "old_log_probs") if with_old else ("advantages",)

    plain, _, plain_gradient = run(config(), arrays, columns)
    weighted, _, weighted_gradient = run(config(), arrays, (*columns, "rollout_is_weights"))

    assert plain == weighted
    np.testing.assert_array_equal(plain_gradient, weighted_gradient)


@pytest.mark.parametrize("name", get_args(KlEstimator))
def test_every_kl_estimate_that_can_be_configured_equals_the_reference(name: KlEstimator) -> None:
    rng = np.random.default_rng(shifted(5))
    log_probs, ref = -rng.exponential(2.0, 50), -rng.exponential(2.0, 50)
    log_probs[0], ref[0] = -40.0, -1.0  # beyond both clamps

    estimate = kl_estimate(torch.tensor(log_probs).float(), torch.tensor(ref).float(), name)

    expected = [reference_kl(a, b, name.removesuffix("+")) for a, b in zip(log_probs, ref, strict=True)]
    np.testing.assert_allclose(estimate.numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["k1+", "kl+", "abs+", "k3+", "low_var_kl+"])
def test_a_plus_estimate_has_the_gradient_of_k2(name: KlEstimator) -> None:
    log_probs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    ref = torch.tensor([-1.5, -1.0, -0.5])

    kl_estimate(log_probs, ref, name).sum().backward()

    torch.testing.assert_close(log_probs.grad, (log_probs - ref).detach())


def test_entropy_bonus_and_kl_enter_the_loss_with_their_coefficients() -> None:
    arrays = experience(3, [8, 4, 3])
    columns = ("old_log_probs", "advantages", "ref_log_probs")
    plain, _, _ = run(config(), arrays, columns)

    loss, metrics, _ = run(config(entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.2), arrays, columns)

    kl = sum(
        w * reference_kl(a, b, "k3")
        for w, a, b in zip(arrays["weights"], arrays["log_probs"], arrays["ref_log_probs"], strict=True)
    )
    entropy = float((arrays["weights"] * arrays["entropy"]).sum())
    assert loss == pytest.approx(plain - 0.1 * entropy + 0.2 * kl, rel=1e-5)
    assert metrics["kl_loss"] == pytest.approx(kl, rel=1e-4)
    assert metrics["pg_loss"] == pytest.approx(plain, rel=1e-6)


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_is_that_of_reinforce() -> None:
    arrays = experience(8, [6, 6, 2])

    loss, metrics, gradient = run(config(), arrays, ("advantages",))

    assert loss == pytest.approx(-(arrays["weights"] * arrays["advantages"]).sum(), rel=1e-5)
    assert metrics["ppo_kl"] == 0.0
    np.testing.assert_allclose(gradient, -arrays["weights"] * arrays["advantages"], rtol=1e-5, atol=1e-7)


def test_a_batch_without_any_counting_token_gives_zero_not_nan() -> None:
    arrays = experience(1, [4])

    loss, metrics, gradient = run(config(), arrays, ("old_log_probs", "advantages"))

    assert loss == 0.0
    assert set(metrics.values()) == {0.0}
    assert not gradient.any()


def test_the_configuration_knows_every_loss() -> None:
    assert set(LOSS_MODES) == set(POLICY_LOSSES)
    reads_old = {name for name, loss in POLICY_LOSSES.items() if "old_log_probs" in loss.prepared_from}
    assert reads_old == set(COVARIANCE_LOSSES)
