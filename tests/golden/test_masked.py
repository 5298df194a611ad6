"""Masked statistics against numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from controller.ppo.masked_stats import masked_mean, masked_sum, masked_var, masked_whiten

VALUES_BT = np.array([[1.0, 2.0, np.nan], [3.0, np.inf, 6.0]], np.float32)
MASK_BT = np.array([[True, True, False], [True, False, True]])


def test_sums_and_means_never_look_outside_the_mask() -> None:
    assert masked_sum(VALUES_BT, MASK_BT) == 12.0
    np.testing.assert_allclose(masked_sum(VALUES_BT, MASK_BT, axis=1), [3.0, 9.0])
    assert masked_mean(VALUES_BT, MASK_BT) == pytest.approx(3.0)
    np.testing.assert_allclose(masked_mean(VALUES_BT, MASK_BT, axis=1), [1.5, 4.5])


def test_the_mean_of_an_empty_row_is_zero() -> None:
    np.testing.assert_array_equal(masked_mean(VALUES_BT, np.zeros((2, 3), bool), axis=1), [0.0, 0.0])


def test_the_variance_is_the_unbiased_one() -> None:
    # Deviations from 3 are -2, -1, 0, 3: squares sum to 14, divided by n - 1 = 3.
    assert masked_var(VALUES_BT, MASK_BT) == pytest.approx(14 / 3)


@pytest.mark.parametrize("count", [0, 1])
def test_a_variance_of_fewer_than_two_tokens_is_refused(count: int) -> None:
    mask_BT = np.zeros((2, 3), bool)
    mask_BT[0, :count] = True
    with pytest.raises(ValueError, match=f"at least two response tokens in the batch, got {count}"):
        masked_var(VALUES_BT, mask_BT)


def test_whitening_scales_the_mask_and_puts_zero_elsewhere() -> None:
    scale = (14 / 3) ** 0.5
    expected_BT = np.array([[-2 / scale, -1 / scale, 0.0], [0.0, 0.0, 3 / scale]])
    np.testing.assert_allclose(masked_whiten(VALUES_BT, MASK_BT), expected_BT, rtol=1e-7, atol=1e-8)


def test_a_single_token_whitens_to_zero() -> None:
    mask_BT = np.zeros((2, 3), bool)
    mask_BT[1, 2] = True
    assert masked_whiten(np.full((2, 3), 7.0), mask_BT).tolist() == [[0.0] * 3] * 2


def test_a_constant_batch_whitens_to_zero_not_to_nan() -> None:
    np.testing.assert_allclose(masked_whiten(np.full((2, 3), 7.0), MASK_BT), np.zeros((2, 3)), atol=1e-3)
