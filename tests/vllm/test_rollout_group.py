"""A rollout group that samples with vLLM, against an actor whose group does: the same tokens for each version."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.vllm.conftest import Groups
from tests.vllm.inputs import NUM_PROMPTS

pytestmark = pytest.mark.vllm

MAX_LOG_PROB_DIFF = 1e-4
# Of the three published versions; also older ones, and one that the group has already.
ORDER = (0, 1, 2, 1, 1, 0)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.extended)], ids="tensor-parallel-{}".format)
def test_it_samples_every_version_as_the_actor_that_published_it(
    groups: Groups, alone: Callable[[str], dict[str, Any]], num_ranks: int
) -> None:
    """It has forgotten prefixes of other weights, and has every weight, all of them of this version."""
    versions = alone("published")["versions"]
    asked = json.dumps([[versions[number]["version"], versions[number]["sha256"]] for number in ORDER])
    options = {"world_size": num_ranks, "tensor_model_parallel_size": num_ranks, "max_num_seqs": 64}
    leader, *others = groups.run(f"synced_{num_ranks}", asked, actor="alone", **options)

    for number, found in zip(ORDER, leader["versions"], strict=True):
        expected = versions[number]
        assert found["rows"] == expected["rows"] == list(range(NUM_PROMPTS))
        assert found["responses"] == expected["responses"], number
        np.testing.assert_allclose(found["log_probs"], expected["log_probs"], atol=MAX_LOG_PROB_DIFF)
    for kind in zip(*(version["responses"] for version in versions), strict=True):
        assert len({json.dumps(responses) for responses in kind}) == len(versions)
    assert leader["again"] == leader["versions"][-1]["responses"]
    assert [version["rows"] for rank in others for version in rank["versions"]] == [[]] * len(ORDER) * len(others)


@pytest.mark.extended
@pytest.mark.parametrize("model", ["qwen2", "glm4_moe"])
def test_an_actor_and_a_group_answer_half_of_the_prompts_each_as_one_of_them_answers_all(
    groups: Groups, model: str
) -> None:
    options: dict[str, Any] = {"model": model, "share": 0.5, "max_num_seqs": 64}
    actor = groups.run(f"{model}_of_actor", "shared", **options)[0]["shared"]
    versions = json.dumps([actor["version"]])
    [group] = groups.run(f"{model}_of_group", versions, actor=f"{model}_of_actor", **options)
    assert [actor["half"], group["half"]] == [actor["all"][::2], actor["all"][1::2]]
