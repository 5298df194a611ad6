"""vLLM against the policy itself: the same tokens before and after updates, for every layout of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.vllm.conftest import Found, Groups
from tests.vllm.inputs import NUM_PROMPTS
from tests.vllm.worker import draws, seed_all

pytestmark = pytest.mark.vllm

Alone = Callable[[str], dict[str, Any]]
MAX_LOG_PROB_DIFF = 1e-4


def check_greedy(found: list[dict[str, Any]]) -> None:
    """Every prompt was answered once per step, by both engines alike, and not alike in all steps."""
    steps = [[rank["greedy"]["steps"][step] for rank in found] for step in range(4)]
    answers = []
    for ranks in steps:
        assert sorted(row for rank in ranks for row in rank["rows"]) == list(range(NUM_PROMPTS))
        assert [rank["vllm"] for rank in ranks] == [rank["hf"] for rank in ranks]
        assert max(rank["log_prob_diff"] for rank in ranks) <= MAX_LOG_PROB_DIFF
        answers.append([rank["vllm"] for rank in ranks])
    assert all(before != after for before, after in itertools.pairwise(answers))


@pytest.mark.promise("vllm")
def test_greedy_tokens_are_the_policys_before_and_after_each_update(alone: Alone) -> None:
    check_greedy([{"greedy": alone("greedy")}])


@pytest.mark.parametrize("model", ["llama", pytest.param("qwen2", marks=pytest.mark.extended)])
def test_logits_of_a_bf16_policy_are_fp32_with_tied_and_with_separate_embeddings(groups: Groups, model: str) -> None:
    [found] = groups.run(f"head_{model}", "head", model=model, dtype="bf16")
    assert found["head"]["logit_error"] <= 1e-5
    assert found["head"]["log_prob_diff"] <= 0.05  # hidden states are bf16 on both sides, and rounded differently


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_merged_adapters_answer_like_the_policy_with_adapters_before_and_after_each_update(
    groups: Groups, num_ranks: int
) -> None:
    """All ranks share an engine, on a model with an output layer of its own, which has no adapter."""
    options: dict[str, Any] = {"world_size": num_ranks, "tensor_model_parallel_size": num_ranks}
    check_greedy(groups.run(f"adapters_{num_ranks}", "greedy", model="llama", lora_rank=8, **options))


@pytest.mark.parametrize(
    ("model", "num_ranks"),
    [
        ("qwen3_moe", 1),
        *(
            pytest.param(*variant, marks=pytest.mark.extended)
            for variant in (("mixtral", 1), ("mixtral", 2), ("glm4_moe", 1))
        ),
    ],
)
def test_experts_answer_like_the_policy_before_and_after_each_update(
    groups: Groups, model: str, num_ranks: int
) -> None:
    """The policy stacks the experts of a layer; vLLM gets them one by one, and the buffer that chooses them."""
    check_greedy(
        groups.run(
            f"{model}_{num_ranks}", "greedy", model=model, world_size=num_ranks, tensor_model_parallel_size=num_ranks
        )
    )


@pytest.mark.parametrize(
    ("fixture", "ranks_per_engine"),
    [
        ("shared_engine", 2),
        *(pytest.param(*each, marks=pytest.mark.extended) for each in (("replicas", 1), ("replicas_of_two", 2))),
    ],
)
def test_ranks_and_replicas_answer_like_the_policy(
    request: pytest.FixtureRequest, fixture: str, ranks_per_engine: int
) -> None:
    found = request.getfixturevalue(fixture)
    check_greedy(found)
    for rank, facts in enumerate(found):
        assert bool(facts["streaming"]["rows"]) == (rank % ranks_per_engine == 0)
        check_cancellation(facts["cancellation"])
    check_streaming([facts["streaming"] for facts in found])


def test_without_the_sync_tokens_and_log_probs_give_it_away(alone: Alone) -> None:
    found = alone("skipped_sync")
    assert found["vllm"] != found["hf"]
    assert found["log_prob_diff"] > 100 * MAX_LOG_PROB_DIFF


def test_the_generators_of_the_process_are_left_alone(alone: Alone) -> None:
    seed_all()
    assert alone("random_state")["draws"] == draws()


@pytest.mark.promise("vllm")
def test_the_same_seeds_give_the_same_tokens(alone: Alone) -> None:
    replayed = alone("replay")
    assert sum(map(len, replayed["first"])) > 2000
    assert replayed["first"] == replayed["second"]
    assert len({tuple(row) for row in replayed["first"]}) > 400


@pytest.mark.extended
def test_they_do_so_whatever_is_decoded_together_and_where(alone: Alone, replicas: Found) -> None:
    wide = alone("replay")
    num_samples = len(wide["first"]) // len(wide["rows"])
    for rank in replicas:
        narrow = rank["replay"]
        assert len(narrow["rows"]) == len(wide["rows"]) // 2
        expected = [
            wide["first"][row * num_samples + sample] for row in narrow["rows"] for sample in range(num_samples)
        ]
        assert narrow["first"] == expected


def test_a_shared_prefix_is_computed_anew_after_an_update(alone: Alone) -> None:
    steps = alone("prefixes")["steps"]
    for step in steps:
        assert step["vllm"] == step["hf"]
        assert step["again"] == step["vllm"]
    assert steps[0]["vllm"] != steps[1]["vllm"]


def test_sampling_parameters_reach_the_engine(alone: Alone) -> None:
    found = alone("sampling")
    assert found["num_rows"] == 4 * 8
    for kind in ("top_k_1", "nucleus"):
        assert found[kind] == found["greedy"], kind
    assert found["cut"] == found["cut_by_policy"]
    # So cold that a difference of 1e-5 in a log-prob may tell two tokens apart that are almost as likely.
    agreeing = [a == b for a, b in zip(found["cold"], found["cold_by_policy"], strict=True)]
    assert np.mean(agreeing) > 0.8
    assert found["hot"] == found["hot_by_policy"] != found["greedy"]


def test_stop_texts_end_a_response_where_the_policys_own_engine_ends_it(shared_engine: Found) -> None:
    found = shared_engine[0]["stop_texts"]
    assert found["vllm"] == found["hf"]
    lengths = [len(row) for row in found["vllm"]]
    assert min(lengths) < 16
    assert len(set(lengths)) > 1


def check_cuts(found: dict[str, Any]) -> None:
    """A response in pieces has the tokens of the uncut one, and each piece but the last says that it goes on."""
    for run in found["runs"]:
        assert run["pieces"] == run["whole"]
        assert run["log_prob_diff"] <= 1e-5
        assert run["num_cuts"] == sum((len(row) - 1) // run["num_tokens"] for row in run["whole"])
    assert found["runs"][0]["num_cuts"] > found["runs"][-1]["num_cuts"] == 0


def test_a_response_in_pieces_has_the_tokens_of_an_uncut_one(alone: Alone) -> None:
    check_cuts(alone("cuts"))


def test_a_stop_text_ends_a_response_in_pieces_also_if_it_began_in_the_piece_before(shared_engine: Found) -> None:
    """On ranks that share an engine, of which one has the rows."""
    found = shared_engine[0]["cuts"]
    check_cuts(found)
    assert [len(row) for run in found["runs"] for row in run["whole"] if 1 < len(row) < 16]


def check_streaming(found: list[dict[str, Any]]) -> None:
    """The parts of each rank make up its rows, and are the same when the same is sampled again."""
    answered = []
    for rank in found:
        places = [2 * row + sample for row in rank["rows"] for sample in range(2)]
        streamed = {place: row for part in rank["parts"] for place, row in zip(*part, strict=True)}
        assert streamed == dict(zip(places, rank["streamed"], strict=True))
        assert rank["streamed"] == rank["unstreamed"]
        assert rank["again"] == rank["parts"]
        assert len(rank["parts"]) == 3
        answered += streamed
    assert sorted(answered) == list(range(18))


def test_parts_hold_the_responses_that_end_next(alone: Alone) -> None:
    found = alone("streaming")
    check_streaming([found])
    lengths = [[len(row) for row in rows] for _, rows in found["parts"]]
    assert list(map(len, lengths)) == [9, 5, 4]
    assert max(lengths[0]) <= min(lengths[1]) <= max(lengths[1]) <= min(lengths[2])


def check_cancellation(found: dict[str, Any]) -> None:
    assert found["cancelled"]
    assert found["reports"] < 16
    assert found["before"] == found["after"]


def test_a_cancelled_engine_goes_on(alone: Alone) -> None:
    check_cancellation(alone("cancellation"))
