"""vLLM on GPUs: syncs, sleep levels, prefixes, seeds, cancelled commands, and two ranks an engine.

tests/vllm/any_device.py has what is tried out and checked; tests/vllm/test_any_device.py does it on a CPU. Where the
trainer's log-probs are far away, or an engine does not start, the error of the ranks says more than the test.
"""

from __future__ import annotations

import pytest
import torch

from splitppo.config.rollout_packages import installed_version
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

IS_FOR_GPUS = "cpu" not in (installed_version("vllm") or "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not IS_FOR_GPUS, reason="needs vLLM for GPUs: make setup VLLM=1 LOCK=cuda"),
]


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Groups:
    return Groups(tmp_path_factory.mktemp("vllm"), {}, on_gpus=True)


def run(groups: Groups, level: int, *, num_ranks: int = 1, dtype: str = "bf16") -> Found:
    """Runs an actor whose ranks share an engine with CUDA graphs; with level 0 it also samples with older weights."""
    return groups.run(
        f"level_{level}_{dtype}_{num_ranks}",
        *(() if level else ("not_synced",)),
        *NAMES,
        world_size=num_ranks,
        dtype=dtype,
        tensor_model_parallel_size=num_ranks,
        kv_cache_gb=KV_CACHE_GB,
        sleep_level=level,
    )


@pytest.fixture
def awake(groups: Groups) -> Found:
    return run(groups, 0)


@pytest.fixture
def limits(awake: Found) -> Limits:
    return limits_of("bf16", awake)


def test_an_engine_has_the_trainers_weights_after_each_update(awake: Found, limits: Limits) -> None:
    check_syncs(awake, limits)


def test_nothing_is_left_of_a_prefix_of_older_weights(awake: Found, limits: Limits) -> None:
    check_prefixes(awake, limits)


def test_equal_seeds_give_equal_tokens(awake: Found) -> None:
    check_seeds(awake)


def test_a_cancelled_engine_goes_on_also_after_an_update(awake: Found, limits: Limits) -> None:
    check_cancellation(awake, limits)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_an_engine_goes_on_after_its_sleep_with_the_same_weights_and_with_new_ones(
    groups: Groups, limits: Limits, level: int
) -> None:
    ranks = run(groups, level)
    check_rest(ranks, limits, level=level, gives_back=int(KV_CACHE_GB * 2**30) if level else 0)
    check_syncs(ranks, limits)
    check_prefixes(ranks, limits)
    check_cancellation(ranks, limits)


def test_log_probs_in_fp32_are_as_near_as_a_run_demands(groups: Groups) -> None:
    ranks = run(groups, 0, dtype="fp32")
    check_syncs(ranks, limits_of("fp32", ranks))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_share_an_engine_and_sleep_together(groups: Groups, limits: Limits) -> None:
    ranks = run(groups, 2, num_ranks=2)
    check_rest(ranks, limits, level=2, gives_back=int(KV_CACHE_GB * 2**30))
    check_syncs(ranks, limits)
    check_seeds(ranks)
    check_cancellation(ranks, limits)
