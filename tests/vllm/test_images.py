"""vLLM samples prompts with images as the policy itself does, from the same pixels, and with the latest weights."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from tests.support.vision_models import FAMILIES
from tests.vllm.conftest import Groups
from tests.vllm.inputs import IMAGES_OF_PROMPTS

pytestmark = pytest.mark.vllm

MAX_LOG_PROB_DIFF = 1e-4
# Little fits into one engine step: prompts, and images in them, are computed in pieces.
IN_PIECES = {"max_num_batched_tokens": 16, "max_num_seqs": 4}


@pytest.mark.parametrize("settings", [{}, pytest.param(IN_PIECES, marks=pytest.mark.extended)], ids=["whole", "pieces"])
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.extended)], ids="tensor-parallel-{}".format)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_policys_before_and_after_updates_of_its_tower(
    groups: Groups, family: str, num_ranks: int, settings: dict[str, Any]
) -> None:
    """Also among sampled image tokens; nothing is left of features that an older tower has computed."""
    name = f"{family}_{num_ranks}_{len(settings)}"
    options = {"model": family, "world_size": num_ranks, "tensor_model_parallel_size": num_ranks, **settings}
    leader = groups.run(name, "images", **options)[0]
    steps = leader["images"]["steps"]
    for step in steps:
        assert step["rows"] == [*range(len(IMAGES_OF_PROMPTS))]
        assert step["vllm"] == step["hf"]
        assert step["log_prob_diff"] <= MAX_LOG_PROB_DIFF
    assert any(step["num_image_tokens"] for step in steps)
    assert all(before["vllm"] != after["vllm"] for before, after in itertools.pairwise(steps))


def test_a_damaged_image_is_named_and_the_engine_goes_on(groups: Groups) -> None:
    [found] = groups.run("damaged", "damaged_image", model="qwen2_5_vl")
    damaged = found["damaged_image"]
    assert re.search("image [0-9a-f]{32} is truncated", damaged["error"])
    assert damaged["before"] == damaged["after"]


@pytest.mark.extended
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_bf16_policy_that_reads_images_are_fp32(groups: Groups, family: str) -> None:
    [found] = groups.run(f"head_{family}", "head", model=family, dtype="bf16")
    assert found["head"]["logit_error"] <= 1e-5
    assert found["head"]["log_prob_diff"] <= 0.05
