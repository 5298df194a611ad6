"""On a CPU: what vLLM must do on every device. tests/gpu/test_vllm_gpu.py does the same on GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.any_device import (
    KV_CACHE_GB,
    NAMES,
    Limits,
    check_cancellation,
    check_prefixes,
    check_rest,
    check_seeds,
    check_syncs,
    limits_of,
)
from tests.vllm.conftest import Found, Groups

pytestmark = pytest.mark.vllm


VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "two ranks an engine": {"world_size": 2, "tensor_model_parallel_size": 2},
    "level 1": {"sleep_level": 1},
    "level 2": {"sleep_level": 2},
}


@pytest.fixture(params=["fp32", *(pytest.param(name, marks=pytest.mark.extended) for name in list(VARIANTS)[1:])])
def variant(request: pytest.FixtureRequest) -> dict[str, Any]:
    return VARIANTS[request.param]


def run(groups: Groups, *, sleep_level: int = 0, dtype: str = "fp32", **options: Any) -> Found:
    """Runs an actor that sleeps as at this level; with level 0 it also samples with older weights."""
    name = "_".join(map(str, ("any_device", sleep_level, dtype, *options.values())))
    before = ("sleep_on_a_cpu",) if sleep_level else ("not_synced",)
    options |= {"sleep_level": sleep_level, "kv_cache_gb": KV_CACHE_GB}
    return groups.run(name, *before, *NAMES, dtype=dtype, **options)


@pytest.fixture
def ranks(groups: Groups, variant: dict[str, Any]) -> Found:
    return run(groups, **variant)


@pytest.fixture
def limits(groups: Groups, variant: dict[str, Any]) -> Limits:
    return limits_of(variant.get("dtype", "fp32"), run(groups, **variant | {"sleep_level": 0}))


def test_an_engine_has_the_trainers_weights_after_each_update(ranks: Found, limits: Limits) -> None:
    check_syncs(ranks, limits)


def test_nothing_is_left_of_a_prefix_of_older_weights(ranks: Found, limits: Limits) -> None:
    check_prefixes(ranks, limits)


def test_an_engine_goes_on_after_its_sleep_with_the_same_weights_and_with_new_ones(
    ranks: Found, limits: Limits, variant: dict[str, Any]
) -> None:
    check_rest(ranks, limits, level=variant.get("sleep_level", 0), gives_back=0)


def test_equal_seeds_give_equal_tokens(ranks: Found) -> None:
    check_seeds(ranks)


def test_a_cancelled_engine_goes_on_also_after_an_update(ranks: Found, limits: Limits) -> None:
    check_cancellation(ranks, limits)
