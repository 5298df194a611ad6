"""Properties of the correction of any rollouts: any log-probs, any mask, any option."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from controller.ppo.rollout_correction import correct_rollout
from splitppo.config.sections.algorithm import RolloutCorrectionConfig
from splitppo.config.subsections.rejection import REJECTION_OPTIONS
from splitppo.run_folder.metrics import check_declared

few = settings(max_examples=80)


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probs by trainer and rollout backend, however far apart, and a mask that may have holes and empty rows."""
    shape = draw(st.tuples(st.integers(0, 6), st.integers(0, 8)))
    log_probs = st.floats(-100, 0, width=32)
    old, rollout = (draw(hnp.arrays(np.float32, shape, elements=log_probs)) for _ in range(2))
    return old, rollout, draw(hnp.arrays(np.bool_, shape))


@st.composite
def configs(draw: st.DrawFn) -> RolloutCorrectionConfig:
    level = draw(st.sampled_from([None, "token", "sequence"]))
    options = draw(st.lists(st.sampled_from(REJECTION_OPTIONS), unique=True, max_size=3))
    threshold = draw(st.floats(1.0, 10.0, exclude_min=True))
    return RolloutCorrectionConfig(
        rollout_is=level,
        rollout_is_threshold=draw(st.floats(1.0, 10.0)),
        rollout_is_batch_normalize=level is not None and draw(st.booleans()),
        rollout_rs=",".join(options) or None,
        rollout_rs_threshold=threshold if options else None,
    )


@few
@given(rollouts(), configs())
def test_rejection_only_removes_tokens_and_every_number_is_finite_and_declared(batch, config) -> None:
    old, rollout, mask = batch
    correction = correct_rollout(config, old, rollout, mask)

    assert not (correction.learned & ~mask).any()
    assert np.isfinite(list(correction.metrics.values())).all()
    check_declared(correction.metrics)
    if not config.rejections:
        np.testing.assert_array_equal(correction.learned, mask)


@few
@given(rollouts(), configs())
def test_weights_are_positive_up_to_the_threshold_and_zero_outside_the_mask(batch, config) -> None:
    old, rollout, mask = batch
    weights = correct_rollout(config, old, rollout, mask).weights

    assert (weights is None) == (config.rollout_is is None)
    if weights is not None:
        assert (weights[mask] > 0).all()
        assert not weights[~mask].any()
        if not config.rollout_is_batch_normalize:
            assert (weights[mask] <= np.float32(config.rollout_is_threshold)).all()


@few
@given(rollouts(), st.floats(1.0, 10.0))
def test_normalised_token_weights_have_mean_one(batch, threshold) -> None:
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold=threshold, rollout_is_batch_normalize=True
    )
    old, rollout, mask = batch
    weights = correct_rollout(config, old, rollout, mask).weights

    assert weights is not None
    if mask.any():
        np.testing.assert_allclose(weights[mask].astype(np.float64).mean(), 1.0, rtol=1e-5)


@few
@given(rollouts(), configs())
def test_equal_log_probs_weigh_one_are_all_kept_and_have_no_kl(batch, config) -> None:
    old, _, mask = batch
    correction = correct_rollout(config, old, old, mask)

    np.testing.assert_array_equal(correction.learned, mask)
    if correction.weights is not None:
        np.testing.assert_array_equal(correction.weights[mask], 1.0)
    if mask.any():
        for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_abs_diff"):
            assert correction.metrics[f"rollout_corr/{name}"] == 0.0
        assert correction.metrics["rollout_corr/ppl_ratio"] == 1.0
        assert correction.metrics["training/rollout_probs_diff_max"] == 0.0


@few
@given(rollouts(), configs())
def test_what_stands_outside_the_mask_does_not_matter(batch, config) -> None:
    old, rollout, mask = batch
    correction = correct_rollout(config, old, rollout, mask)
    other = correct_rollout(config, np.where(mask, old, np.nan), np.where(mask, rollout, -np.inf), mask)

    np.testing.assert_array_equal(correction.learned, other.learned)
    np.testing.assert_array_equal(correction.weights, other.weights)
    assert correction.metrics == other.metrics
