"""Properties of the advantages of any batch: any mask, any rewards, any grouping."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from controller.ppo.advantages.arrays import turns_of
from controller.ppo.advantages.decoupled_gae import configured_gae
from controller.ppo.advantages.gae import gae
from controller.ppo.advantages.registry import ESTIMATORS, compute_advantages, over_batch
from controller.ppo.masked_stats import masked_whiten
from splitppo.batch import Column
from splitppo.config import AlgorithmConfig

few = settings(max_examples=60)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, np.ndarray]:
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 8)))
    reals = st.floats(-10, 10, width=32)
    return {
        "rewards_BT": draw(hnp.arrays(np.float32, shape, elements=reals)),
        "values_BT": draw(hnp.arrays(np.float32, shape, elements=reals)),
        "mask_BT": draw(hnp.arrays(np.bool_, shape)),
        "groups_B": draw(hnp.arrays(np.int64, shape[0], elements=st.integers(0, 3))),
        "greedy_scores_B": draw(hnp.arrays(np.float32, shape[0], elements=reals)),
        "components_KB": draw(hnp.arrays(np.float32, (2, shape[0]), elements=reals)),
    }


def advantages_of(name: str, batch: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    assume(batch["mask_BT"].sum() >= 2)
    keys = {"adv_estimator": name, "gamma": 0.9, "lam": 0.8, "adaptive_lam_alpha": 0.5}
    parts = {"gdpo_reward_keys": ["a", "b"]} if name == "gdpo" else {}
    algorithm, mask_BT = AlgorithmConfig.model_validate(keys | parts), batch["mask_BT"]
    others = {name: array for name, array in batch.items() if name != "mask_BT"}
    advantages_BT, returns_BT = compute_advantages(algorithm, learned_BT=mask_BT, **others)
    column = Column(advantages_BT.reshape(-1), np.full(len(mask_BT), mask_BT.shape[1], np.int32))
    scores_B = np.where(mask_BT, batch["rewards_BT"], 0.0).sum(axis=1)
    done_N = over_batch(algorithm, column, mask_BT.reshape(-1), scores_B)
    return done_N.reshape(mask_BT.shape), returns_BT


@few
@given(batches())
def test_whitened_values_have_mean_zero_and_variance_one(batch: dict[str, np.ndarray]) -> None:
    inside = batch["values_BT"][batch["mask_BT"]].astype(np.float64)
    assume(len(inside) >= 2 and inside.std() > 1e-2)
    whitened = masked_whiten(batch["values_BT"], batch["mask_BT"])[batch["mask_BT"]]
    np.testing.assert_allclose(whitened.mean(), 0.0, atol=1e-5)
    np.testing.assert_allclose(whitened.var(ddof=1), 1.0, rtol=1e-3)


@few
@given(batches())
def test_gae_with_gamma_and_lam_one_is_reward_to_go_minus_value(batch: dict[str, np.ndarray]) -> None:
    mask_BT = batch["mask_BT"]
    advantages_BT, returns_BT = gae(batch["rewards_BT"], batch["values_BT"], mask_BT, gamma=1.0, lam=1.0)
    rewards_BT = np.where(mask_BT, batch["rewards_BT"], 0.0).astype(np.float64)
    to_go_BT = np.where(mask_BT, rewards_BT[:, ::-1].cumsum(axis=1)[:, ::-1], 0.0)
    np.testing.assert_allclose(returns_BT, to_go_BT, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(advantages_BT, np.where(mask_BT, to_go_BT - batch["values_BT"], 0), rtol=1e-5, atol=1e-4)


rates = st.floats(0, 1)


@few
@given(batches(), st.data(), rates, rates, rates, rates)
def test_gae_by_turn_agrees_with_a_loop_over_tokens_whatever_is_rejected(
    batch: dict[str, np.ndarray], data: st.DataObject, gamma: float, lam: float, turn_gamma: float, turn_lam: float
) -> None:
    rewards, values, sampled_BT = batch["rewards_BT"].tolist(), batch["values_BT"].tolist(), batch["mask_BT"]
    learned_BT = sampled_BT & data.draw(hnp.arrays(np.bool_, sampled_BT.shape))
    algorithm = AlgorithmConfig(gamma=gamma, lam=lam, turn_gamma=turn_gamma, turn_lam=turn_lam)
    results = compute_advantages(
        algorithm,
        learned_BT=learned_BT,
        response_mask_BT=sampled_BT,
        **{k: v for k, v in batch.items() if k != "mask_BT"},
    )
    for row, learned in enumerate(learned_BT.tolist()):
        next_advantage, next_value, is_other_turn = 0.0, 0.0, False
        for place in reversed(range(len(learned))):
            expected = (0.0, 0.0)
            if learned[place]:
                g, lam_t = (turn_gamma, turn_lam) if is_other_turn else (gamma, lam)
                delta = rewards[row][place] + g * next_value - values[row][place]
                next_advantage, next_value = delta + g * lam_t * next_advantage, values[row][place]
                expected, is_other_turn = (next_advantage, next_advantage + next_value), False
            elif not sampled_BT[row, place]:
                is_other_turn = True
            for result_BT, number in zip(results, expected, strict=True):
                np.testing.assert_allclose(result_BT[row, place], number, rtol=1e-5, atol=1e-5)


@few
@given(batches(), rates, rates)
def test_rates_by_turn_like_those_inside_are_gae_to_the_bit(
    batch: dict[str, np.ndarray], gamma: float, lam: float
) -> None:
    given = batch["rewards_BT"], batch["values_BT"], batch["mask_BT"]
    expected = gae(*given, gamma=gamma, lam=lam)
    for turn_rates in ({}, {"turn_gamma": gamma, "turn_lam": lam}):
        results = configured_gae(*given, turns_of(batch["mask_BT"]), gamma=gamma, lam=lam, **turn_rates)
        for result_BT, expected_BT in zip(results, expected, strict=True):
            assert result_BT.tobytes() == expected_BT.tobytes()


@few
@given(batches(), rates, rates, rates, rates, st.data())
def test_responses_of_one_turn_are_gae_whatever_the_rates_between_turns(
    batch: dict[str, np.ndarray], gamma: float, lam: float, turn_gamma: float, turn_lam: float, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 8), min_size=len(batch["mask_BT"]), max_size=len(batch["mask_BT"])))
    mask_BT = np.arange(batch["mask_BT"].shape[1]) < np.array(lengths)[:, None]
    learned_BT = mask_BT & batch["mask_BT"]  # holes that rejection makes end no turn
    given = batch["rewards_BT"], batch["values_BT"], learned_BT
    rates = {"turn_gamma": turn_gamma, "turn_lam": turn_lam}
    results = configured_gae(*given, turns_of(mask_BT), gamma=gamma, lam=lam, **rates)
    for result_BT, expected_BT in zip(results, gae(*given, gamma=gamma, lam=lam), strict=True):
        assert result_BT.tobytes() == expected_BT.tobytes()


@few
@given(st.sampled_from(sorted(ESTIMATORS)), batches(), st.randoms(use_true_random=False))
def test_permuting_rows_permutes_the_result(name: str, batch: dict[str, np.ndarray], random: object) -> None:
    order = np.random.default_rng(random.randrange(2**32)).permutation(len(batch["mask_BT"]))  # type: ignore[attr-defined]
    permuted = {key: array[..., order] if key == "components_KB" else array[order] for key, array in batch.items()}
    for result_BT, expected_BT in zip(advantages_of(name, permuted), advantages_of(name, batch), strict=True):
        np.testing.assert_allclose(result_BT, expected_BT[order], rtol=1e-4, atol=1e-4)


@few
@given(st.sampled_from(sorted(ESTIMATORS)), batches(), st.integers(1, 5))
def test_more_padding_changes_nothing(name: str, batch: dict[str, np.ndarray], padding: int) -> None:
    padded = dict(batch)
    for key in ("rewards_BT", "values_BT"):
        padded[key] = np.pad(batch[key], ((0, 0), (0, padding)), constant_values=np.nan)
    padded["mask_BT"] = np.pad(batch["mask_BT"], ((0, 0), (0, padding)))
    for result_BT, expected_BT in zip(advantages_of(name, padded), advantages_of(name, batch), strict=True):
        np.testing.assert_allclose(result_BT[:, : expected_BT.shape[1]], expected_BT, rtol=1e-5, atol=1e-5)
        assert (result_BT[:, expected_BT.shape[1] :] == 0.0).all()


@few
@given(batches())
def test_holes_in_the_mask_are_bridged_as_if_the_tokens_were_not_there(batch: dict[str, np.ndarray]) -> None:
    advantages_BT, returns_BT = gae(batch["rewards_BT"], batch["values_BT"], batch["mask_BT"], gamma=0.9, lam=0.8)
    for row, mask_T in enumerate(batch["mask_BT"]):
        tokens = mask_T.nonzero()[0]
        dense_1T = np.ones((1, len(tokens)), bool)
        rewards_1T, values_1T = batch["rewards_BT"][row, None, tokens], batch["values_BT"][row, None, tokens]
        advantages_1T, returns_1T = gae(
            rewards_1T.reshape(1, -1), values_1T.reshape(1, -1), dense_1T, gamma=0.9, lam=0.8
        )
        np.testing.assert_array_equal(advantages_BT[row, tokens], advantages_1T[0])
        np.testing.assert_array_equal(returns_BT[row, tokens], returns_1T[0])
