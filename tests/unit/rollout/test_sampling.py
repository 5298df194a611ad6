"""Sampling of tokens: the random numbers and the distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.rollout.protocol import Sampling
from services.rollout.sampling import sample_tokens, turn_seed, uniforms
from splitppo.config.sections.rollout import MIN_TEMPERATURE
from tests.support.seeds import shifted


def sampling(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Sampling:
    return Sampling(temperature, top_p, top_k, max_response_length=1)


def splitmix64(seed: int, count: int) -> list[float]:
    """Reference with Python's integers."""
    whole = (1 << 64) - 1

    def mix(bits: int) -> int:
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & whole
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & whole
        return bits ^ (bits >> 31)

    golden = 0x9E3779B97F4A7C15
    start = mix((seed + golden) & whole)
    return [(mix((start + t * golden) & whole) >> 11) / 2**53 for t in range(1, count + 1)]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789])
def test_uniforms_equal_splitmix64_in_exact_arithmetic(seed: int) -> None:
    numbers = uniforms(torch.tensor(seed), torch.arange(20))

    assert numbers.dtype == torch.float64
    assert numbers.tolist() == splitmix64(seed, 20)


def test_uniforms_of_neighbouring_seeds_and_positions_are_uniform_and_uncorrelated() -> None:
    numbers = uniforms(torch.arange(2000)[:, None], torch.arange(50)).numpy()

    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    chi_square = ((counts - 2000) ** 2 / 2000).sum()
    assert 23 < chi_square < 85  # 49 degrees of freedom: 0.1 % on either side
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.01


def test_seeds_and_positions_broadcast() -> None:
    seeds, positions = torch.tensor([3, 4]), torch.tensor([7, 2])

    whole = uniforms(seeds[:, None], torch.arange(9))

    assert torch.equal(uniforms(seeds, positions), whole[[0, 1], positions])


def test_the_first_turn_has_the_seed_of_the_response_and_later_ones_have_others() -> None:
    seeds = {turn_seed(seed, position) for seed in (0, 1, -1, 2**63 - 1, -(2**63)) for position in range(1, 400)}

    assert [turn_seed(seed, 0) for seed in (0, -1, 2**63 - 1)] == [0, -1, 2**63 - 1]
    assert len(seeds) > 5 * 399 - 399  # 0 and 1 share neighbours
    assert all(0 <= seed < 2**63 for seed in seeds)


def expected_probs(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The processed distribution, written out token by token in float64."""
    probs = np.exp(logits / temperature - np.max(logits / temperature))
    probs /= probs.sum()
    ranked = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept = ranked[: top_k or len(ranked)]
    mass, nucleus = sum(probs[token] for token in kept), []
    for token in kept:
        nucleus.append(token)
        if sum(probs[other] for other in nucleus) >= top_p * mass:
            break
    result = np.zeros_like(probs)
    result[nucleus] = probs[nucleus]
    return result / result.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.7), (1.3, 4, 0.8)]
)
def test_tokens_follow_the_processed_distribution(temperature: float, top_k: int, top_p: float) -> None:
    logits = np.array([0.3, -1.0, 2.0, 0.5, -0.2, 1.1])
    num_draws = 20_000
    numbers = uniforms(torch.arange(num_draws), torch.tensor(0))

    tokens, _ = sample_tokens(torch.tensor(logits).expand(num_draws, -1), numbers, sampling(temperature, top_p, top_k))

    expected = expected_probs(logits, temperature, top_k, top_p) * num_draws
    counts = np.bincount(tokens.numpy(), minlength=6)
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert chi_square < 20.5  # 0.1 % at 5 degrees of freedom; deterministic


@pytest.mark.parametrize("top_p", [1e-9, 1e-3])
def test_a_tiny_nucleus_keeps_the_most_likely_token(top_p: float) -> None:
    tokens, _ = sample_tokens(torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([0.999]).double(), sampling(top_p=top_p))

    assert tokens.tolist() == [1]


def test_log_probs_are_those_of_the_tempered_softmax_before_truncation() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(shifted(0)))
    numbers = torch.tensor([0.1, 0.4, 0.8, 0.99], dtype=torch.float64)

    tokens, log_probs = sample_tokens(logits, numbers, sampling(temperature=0.7, top_p=0.8, top_k=4))

    expected = torch.log_softmax(logits / 0.7, dim=-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected)


def test_the_smallest_temperature_takes_logits_that_hardly_fit_and_survives_the_wire() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [-3e36, 3e36, 1.0]])
    smallest = sampling(temperature=float(np.float32(MIN_TEMPERATURE)))

    tokens, log_probs = sample_tokens(logits, torch.full((2,), 0.99).double(), smallest)

    assert tokens.tolist() == [0, 1]
    assert log_probs.tolist() == [0.0, 0.0]


def test_greedy_takes_the_most_likely_token_with_its_log_prob_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, -1.0, 0.0]])

    tokens, log_probs = sample_tokens(logits, torch.zeros(2).double(), sampling(temperature=0.0))

    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(log_probs, torch.log_softmax(logits, -1)[[0, 1], [1, 0]])


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_unit_interval_never_give_a_token_of_probability_zero(number: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.1, 0.2, 0.3, -torch.inf]])

    tokens, log_probs = sample_tokens(logits, torch.tensor([number], dtype=torch.float64), sampling())

    assert tokens.tolist() == [1 if number == 0.0 else 3]
    assert torch.isfinite(log_probs).all()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ((-1.0, 1.0, 0, 4), r"temperature must be 0 \(greedy\) or at least 0\.01, and finite, got -1"),
        ((1e-38, 1.0, 0, 4), "temperature must be"),
        ((float("inf"), 1.0, 0, 4), "temperature must be"),
        ((float("nan"), 1.0, 0, 4), "temperature must be"),
        ((1.0, 0.0, 0, 4), "top_p must lie in \\(0, 1\\], got 0.0"),
        ((1.0, 1.5, 0, 4), "top_p must lie"),
        ((1.0, 1.0, -1, 4), "top_k must be 0 \\(every token\\) or positive, got -1"),
        ((1.0, 1.0, 0, 0), "max_response_length must be at least 1, got 0"),
    ],
)
def test_sampling_out_of_range_is_refused(values: tuple[float, float, int, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Sampling(*values)
