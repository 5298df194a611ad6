"""Every estimator against slow references that loop over single tokens in float64."""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from controller.ppo.advantages.gae import gae
from controller.ppo.advantages.registry import ESTIMATORS, compute_advantages, over_batch
from splitppo.batch import Column
from splitppo.config import AlgorithmConfig, Config
from splitppo.config.subsections.estimator import INPUTS, NEEDS
from tests.support.seeds import shifted

pytestmark = [pytest.mark.promise("estimators and losses"), pytest.mark.promise("formulas")]

Rows = list[list[float]]

GAMMA, LAM, LAM_CRITIC, ALPHA = 0.9, 0.8, 0.95, 0.4
WEIGHTS = (1.0, 0.25)


@dataclass
class Case:
    """Six responses of up to nine tokens; NaN wherever nothing may be read."""

    rewards: NDArray[np.float32]
    values: NDArray[np.float32]
    mask: NDArray[np.bool_]
    groups: NDArray[np.int64]
    greedy_scores: NDArray[np.float32]
    components: NDArray[np.float32]

    @property
    def scores(self) -> list[float]:
        return [
            math.fsum(r for r, m in zip(row, row_mask, strict=True) if m)
            for row, row_mask in zip(self.rewards.tolist(), self.mask.tolist(), strict=True)
        ]

    @property
    def tokens(self) -> list[list[int]]:
        """The places of the tokens inside the mask, for each row."""
        return [[t for t, m in enumerate(row) if m] for row in self.mask.tolist()]

    def peers(self, row: int) -> list[int]:
        return [other for other, group in enumerate(self.groups.tolist()) if group == self.groups[row]]


def batch(seed: int = 0) -> Case:
    """Rows that are full, short, empty, with holes inside and at the end; groups of three, two and one."""
    rng = np.random.default_rng(shifted(seed))
    mask_BT = np.array(
        [
            [1, 1, 1, 1, 1, 1, 1, 1, 1],
            [1, 1, 1, 0, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 1, 1, 0, 1, 1],
            [0, 1, 1, 0, 0, 0, 0, 0, 0],
            [1, 0, 0, 0, 0, 0, 0, 0, 0],
        ],
        bool,
    )
    rewards_BT, values_BT = rng.normal(size=(2, 6, 9)).astype(np.float32)
    rewards_BT[~mask_BT] = values_BT[~mask_BT] = np.nan
    greedy_scores_B, components_KB = rng.normal(size=6), rng.normal(size=(2, 6))
    groups_B = np.array([7, 7, 3, 7, 3, 5])
    return Case(
        rewards_BT, values_BT, mask_BT, groups_B, greedy_scores_B.astype(np.float32), components_KB.astype(np.float32)
    )


def in_pairs(seed: int = 1) -> Case:
    """The same, in groups of two, with zeros and ones for scores: one group all 1, one all 0, one of both."""
    case = batch(seed)
    case.mask[2, 0] = True
    case.rewards[case.mask] = 0.0
    for row, score in enumerate([1.0, 1.0, 0.0, 0.0, 1.0, 0.0]):
        case.rewards[row, case.tokens[row][-1]] = score
    case.values[2, 0] = 0.5
    case.groups = np.array([0, 0, 1, 1, 2, 2])
    case.components = np.array([[1, 0, 1, 1, 0, 0], [0.5, 0.5, 2, 3, 0, 1]], np.float32)
    return case


CASES = {"holes": batch, "alike": in_pairs}


def turns(case: Case) -> list[list[int]]:
    """A number for the turn of each token inside the mask: that of the holes before it."""
    return [[t - k for k, t in enumerate(tokens)] for tokens in case.tokens]


# Slow references: plain Python floats, one token after the other, formulas as in the papers.


def reference_gae(case: Case, gamma: float, lams: list[float]) -> Rows:
    """Schulman et al., 2016: A_t = sum_l (gamma lam)^l delta_{t+l} over tokens inside the mask; a lambda per row."""
    rewards, values = case.rewards.tolist(), case.values.tolist()
    advantages = [[0.0] * len(row) for row in rewards]
    for b, tokens in enumerate(case.tokens):
        deltas = []
        for k, t in enumerate(tokens):
            next_value = values[b][tokens[k + 1]] if k + 1 < len(tokens) else 0.0
            deltas.append(rewards[b][t] + gamma * next_value - values[b][t])
        for k, t in enumerate(tokens):
            advantages[b][t] = math.fsum((gamma * lams[b]) ** j * delta for j, delta in enumerate(deltas[k:]))
    return advantages


def reference_two_rates(
    case: Case, inside: tuple[float, list[float]], between: tuple[float, float], turns_of_rows: list[list[int]]
) -> Rows:
    """A_t = delta_t + g l A_{t+1}, delta_t = r_t + g V_{t+1} - V_t; (g, l) are `between` where another turn follows."""
    rewards, values = case.rewards.tolist(), case.values.tolist()
    advantages = [[0.0] * len(row) for row in rewards]
    for b, tokens in enumerate(case.tokens):
        next_advantage = next_value = 0.0
        for k in reversed(range(len(tokens))):
            is_end = k + 1 < len(tokens) and turns_of_rows[b][k] != turns_of_rows[b][k + 1]
            gamma, lam = between if is_end else (inside[0], inside[1][b])
            delta = rewards[b][tokens[k]] + gamma * next_value - values[b][tokens[k]]
            next_advantage, next_value = delta + gamma * lam * next_advantage, values[b][tokens[k]]
            advantages[b][tokens[k]] = next_advantage
    return advantages


def plus_values(case: Case, advantages: Rows) -> Rows:
    summed = (np.array(advantages) + case.values).tolist()
    return [
        [a if m else 0.0 for a, m in zip(*row, strict=True)] for row in zip(summed, case.mask.tolist(), strict=True)
    ]


def reference_returns(case: Case, gamma: float, lam: float) -> Rows:
    """A_t + V_t."""
    return plus_values(case, reference_gae(case, gamma, [lam] * len(case.tokens)))


def reference_to_go(case: Case, gamma: float) -> Rows:
    rewards = case.rewards.tolist()
    to_go = [[0.0] * len(row) for row in rewards]
    for b, tokens in enumerate(case.tokens):
        for k, t in enumerate(tokens):
            to_go[b][t] = math.fsum(gamma**j * rewards[b][later] for j, later in enumerate(tokens[k:]))
    return to_go


def on_tokens(case: Case, advantages: list[float]) -> Rows:
    return [[a if m else 0.0 for m in row] for a, row in zip(advantages, case.mask.tolist(), strict=True)]


def mean_of(values: list[float]) -> float:
    return statistics.fmean(values) if len(values) > 1 else 0.0


def std_of(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 1.0


def reference_grpo(case: Case, scores: list[float], *, by_std: bool) -> list[float]:
    advantages = []
    for row, score in enumerate(scores):
        peers = [scores[other] for other in case.peers(row)]
        advantages.append((score - mean_of(peers)) / (std_of(peers) + 1e-6 if by_std else 1.0))
    return advantages


def reference_passk(case: Case, *, by_std: bool) -> list[float]:
    advantages = []
    for row, score in enumerate(case.scores):
        others = [case.scores[other] for other in case.peers(row) if other != row]
        gain = max(score - max(others), 0.0) if others else 0.0
        advantages.append(gain / (std_of([score, *others]) + 1e-6 if by_std else 1.0))
    return advantages


def reference_rloo(case: Case) -> list[float]:
    advantages = []
    for row, score in enumerate(case.scores):
        others = [case.scores[other] for other in case.peers(row) if other != row]
        advantages.append(score - (statistics.fmean(others) if others else 0.0))
    return advantages


def reference_opo(case: Case) -> list[float]:
    advantages = []
    for row, score in enumerate(case.scores):
        peers = case.peers(row)
        lengths = [len(case.tokens[other]) for other in peers]
        weighted = math.fsum(length * case.scores[other] for length, other in zip(lengths, peers, strict=True))
        baseline = weighted / sum(lengths) if len(peers) > 1 and sum(lengths) else 0.0
        advantages.append(score - baseline)
    return advantages


def reference_gpg(case: Case) -> list[float]:
    nonzero = sum(score != 0.0 for score in case.scores)
    return [len(case.scores) / max(1, nonzero) * a for a in reference_grpo(case, case.scores, by_std=False)]


def reference_gdpo(case: Case, *, by_std: bool) -> list[float]:
    """Weighted sum of the components' group advantages, normalised over the responses that have a token."""
    parts = [reference_grpo(case, part, by_std=by_std) for part in case.components.tolist()]
    summed = [math.fsum(w * part[row] for w, part in zip(WEIGHTS, parts, strict=True)) for row in range(6)]
    learned = [total for total, tokens in zip(summed, case.tokens, strict=True) if tokens]
    mean, scale = statistics.fmean(learned), math.sqrt(statistics.variance(learned) + 1e-8)
    return [(total - mean) / scale for total in summed]


def whitened(case: Case, values: Rows) -> Rows:
    inside = [values[b][t] for b, tokens in enumerate(case.tokens) for t in tokens]
    mean, scale = statistics.fmean(inside), math.sqrt(statistics.variance(inside) + 1e-8)
    return [
        [(v - mean) / scale if m else 0.0 for v, m in zip(row, row_mask, strict=True)]
        for row, row_mask in zip(values, case.mask.tolist(), strict=True)
    ]


def adaptive_lams(case: Case) -> list[float]:
    return [max(0.0, 1.0 - 1.0 / (ALPHA * len(tokens))) if tokens else 0.0 for tokens in case.tokens]


# By a name of ours: the configuration, and what the reference gives for the loss.
REFERENCES: dict[str, tuple[dict[str, object], Callable[[Case], Rows]]] = {
    "gae": ({}, lambda case: whitened(case, reference_gae(case, GAMMA, [LAM] * 6))),
    "gae, decoupled": (
        {"adv_estimator": "gae", "lam_critic": LAM_CRITIC},
        lambda case: whitened(case, reference_gae(case, GAMMA, [LAM] * 6)),
    ),
    "gae, by length": (
        {"adv_estimator": "gae", "adaptive_lam_alpha": ALPHA, "lam_critic": LAM_CRITIC},
        lambda case: whitened(case, reference_gae(case, GAMMA, adaptive_lams(case))),
    ),
    "gae, by turn": (
        {"adv_estimator": "gae", "turn_gamma": 0.6, "turn_lam": 0.3},
        lambda case: whitened(case, reference_two_rates(case, (GAMMA, [LAM] * 6), (0.6, 0.3), turns(case))),
    ),
    "gae, by turn and length": (
        {"adv_estimator": "gae", "turn_lam": 0.3, "adaptive_lam_alpha": ALPHA},
        lambda case: whitened(case, reference_two_rates(case, (GAMMA, adaptive_lams(case)), (GAMMA, 0.3), turns(case))),
    ),
    "grpo": ({}, lambda case: on_tokens(case, reference_grpo(case, case.scores, by_std=True))),
    "grpo, without std": (
        {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False},
        lambda case: on_tokens(case, reference_grpo(case, case.scores, by_std=False)),
    ),
    "grpo_passk": ({}, lambda case: on_tokens(case, reference_passk(case, by_std=True))),
    "grpo_passk, without std": (
        {"adv_estimator": "grpo_passk", "norm_adv_by_std_in_grpo": False},
        lambda case: on_tokens(case, reference_passk(case, by_std=False)),
    ),
    "gdpo": ({}, lambda case: on_tokens(case, reference_gdpo(case, by_std=True))),
    "gdpo, without std": (
        {"adv_estimator": "gdpo", "norm_adv_by_std_in_grpo": False},
        lambda case: on_tokens(case, reference_gdpo(case, by_std=False)),
    ),
    "rloo": ({}, lambda case: on_tokens(case, reference_rloo(case))),
    "opo": ({}, lambda case: on_tokens(case, reference_opo(case))),
    "gpg": ({}, lambda case: on_tokens(case, reference_gpg(case))),
    "reinforce_plus_plus": ({}, lambda case: whitened(case, reference_to_go(case, GAMMA))),
    "reinforce_plus_plus_baseline": (
        {},
        lambda case: whitened(case, on_tokens(case, reference_grpo(case, case.scores, by_std=False))),
    ),
    "remax": (
        {},
        lambda case: [
            [a - greedy if m else 0.0 for a, m in zip(row, row_mask, strict=True)]
            for row, row_mask, greedy in zip(
                reference_to_go(case, 1.0), case.mask.tolist(), case.greedy_scores.tolist(), strict=True
            )
        ],
    ),
}


def algorithm(name: str, **keys: object) -> AlgorithmConfig:
    parts = {"gdpo_reward_keys": ["right", "short"], "gdpo_reward_weights": WEIGHTS}
    keys = {"gamma": GAMMA, "lam": LAM, "adv_estimator": name} | keys
    return AlgorithmConfig.model_validate(keys | (parts if keys["adv_estimator"] == "gdpo" else {}))


def computed(config: AlgorithmConfig, case: Case) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns the advantages as the loss takes them, and the returns."""
    advantages_BT, returns_BT = compute_advantages(
        config,
        case.rewards,
        case.mask,
        groups_B=case.groups,
        values_BT=case.values,
        greedy_scores_B=case.greedy_scores,
        components_KB=case.components,
    )
    lengths = np.full(len(case.mask), case.mask.shape[1], np.int32)
    column = Column(advantages_BT.reshape(-1), lengths)
    done_N = over_batch(config, column, case.mask.reshape(-1), np.array(case.scores))
    return done_N.reshape(case.mask.shape), returns_BT


def test_every_estimator_has_a_reference() -> None:
    assert {str(keys.get("adv_estimator", name)) for name, (keys, _) in REFERENCES.items()} == set(ESTIMATORS)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", REFERENCES)
def test_the_advantages_agree_with_the_reference(name: str, case: str) -> None:
    keys, reference = REFERENCES[name]
    made = CASES[case]()
    advantages_BT, returns_BT = computed(algorithm(name, **keys), made)
    np.testing.assert_allclose(advantages_BT, reference(made), rtol=1e-5, atol=1e-5)
    for result_BT in (advantages_BT, returns_BT):
        assert result_BT.dtype == np.float32
        assert (result_BT[~made.mask] == 0.0).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("keys", "lam"), [({}, LAM), ({"lam_critic": 1.0}, 1.0), ({"adaptive_lam_alpha": 0.1}, LAM)])
def test_the_critic_learns_by_a_lambda_of_its_own(case: str, keys: dict[str, object], lam: float) -> None:
    made = CASES[case]()
    _, returns_BT = computed(algorithm("gae", **keys), made)
    np.testing.assert_allclose(returns_BT, reference_returns(made, GAMMA, lam), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("keys", "inside", "between"),
    [
        ({"turn_gamma": 0.6, "turn_lam": 0.3}, LAM, (0.6, 0.3)),
        ({"turn_lam": 0.0}, LAM, (GAMMA, 0.0)),
        ({"turn_lam": 0.3, "adaptive_lam_alpha": ALPHA}, LAM, (GAMMA, 0.3)),
        # A lambda of the critic's own holds between turns, too: 1 gives Monte-Carlo returns.
        ({"turn_gamma": 0.6, "turn_lam": 0.3, "lam_critic": 1.0}, 1.0, (0.6, 1.0)),
    ],
)
def test_the_critic_learns_returns_of_both_rates(
    case: str, keys: dict[str, object], inside: float, between: tuple[float, float]
) -> None:
    made = CASES[case]()
    _, returns_BT = computed(algorithm("gae", **keys), made)
    expected = reference_two_rates(made, (GAMMA, [inside] * 6), between, turns(made))
    np.testing.assert_allclose(returns_BT, plus_values(made, expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_returns_are_neither_whitened_nor_less_the_baseline(case: str) -> None:
    made = CASES[case]()
    expected = {
        "gae": reference_returns(made, GAMMA, LAM),
        "reinforce_plus_plus": reference_to_go(made, GAMMA),
        "reinforce_plus_plus_baseline": on_tokens(made, reference_grpo(made, made.scores, by_std=False)),
        "remax": reference_to_go(made, 1.0),
    }
    for name, expected_BT in expected.items():
        _, returns_BT = computed(algorithm(name), made)
        np.testing.assert_allclose(returns_BT, expected_BT, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 1.0)])
def test_gae_at_the_ends_of_its_factors(gamma: float, lam: float) -> None:
    case = batch()
    advantages_BT, returns_BT = gae(case.rewards, case.values, case.mask, gamma=gamma, lam=lam)
    np.testing.assert_allclose(advantages_BT, reference_gae(case, gamma, [lam] * 6), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(returns_BT, reference_returns(case, gamma, lam), rtol=1e-6, atol=1e-7)


def test_a_single_response_is_not_normalised_into_a_number() -> None:
    case = batch()
    case.mask[1:] = False
    advantages_BT, _ = computed(algorithm("gdpo"), case)
    assert not advantages_BT.any()


@pytest.mark.parametrize(("name", "missing"), [("gae", "values"), ("remax", "greedy scores"), ("gdpo", "components")])
def test_what_is_missing_is_named(name: str, missing: str) -> None:
    case = batch()
    with pytest.raises(ValueError, match=f"'{name}' needs {missing}"):
        compute_advantages(algorithm(name), case.rewards, case.mask, groups_B=case.groups)


def test_the_configuration_names_exactly_these_estimators_and_what_they_need() -> None:
    assert list(NEEDS) == list(ESTIMATORS)
    optional = {name for needs in NEEDS.values() for name in needs}
    for name, estimator in ESTIMATORS.items():
        parameters = inspect.signature(estimator.function).parameters
        assert set(parameters) <= set(INPUTS)
        assert set(NEEDS[name]) == optional & set(parameters)
        assert Config.model_construct(algorithm=algorithm(name)).uses_critic == ("values_BT" in parameters)


def test_an_unknown_estimator_is_told_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"expected one of gae, grpo, .*, remax, got .* \(did you mean gae\?\)"):
        algorithm("gea")
