"""The terms of the memory estimate, each compared with a calculation by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.memory.estimate import estimate_group
from controller.memory.terms import GIB, Terms
from controller.models.shape import ModelShape
from splitppo.config import Config
from tests.support.small_estimate import MODEL, config, phases

LARGE = ModelShape(
    **{**vars(MODEL), "num_parameters": 2 << 30, "layer_parameters": 1 << 28, "root_parameters": 1 << 29}
)


def test_weights_and_moments_are_fp32_and_sharded(tmp_path: Path) -> None:
    one_rank, two_ranks = (phases(config(tmp_path, services__actor__num_processes=ranks)) for ranks in (1, 2))
    assert (one_rank["generate"].weights, one_rank["generate"].optimizer) == (4000, 8000)
    assert (two_ranks["generate"].weights, two_ranks["generate"].optimizer) == (2000, 4000)
    assert (one_rank["optimizer step"].gradients, two_ranks["optimizer step"].gradients) == (4000, 2000)


def test_saving_takes_one_tensor_beside_the_peak_and_one_file_where_huggingface_is_written(tmp_path: Path) -> None:
    def saving(model: ModelShape, **changes: Any) -> tuple[int, int]:
        memory = estimate_group(config(tmp_path, **changes), "actor", model)
        assert memory.saving is not None
        return memory.saving.checkpoint, memory.saving.total - memory.peak.total

    two_ranks, hugging_face = {"services__actor__num_processes": 2}, {"checkpoint__save_hf_model": True}
    assert saving(MODEL) == (4 * 450, 4 * 450)
    assert saving(LARGE) == (GIB, GIB)
    assert saving(LARGE, **two_ranks)[0] == GIB // 2
    assert saving(MODEL, **hugging_face)[0] == 4 * 1000
    assert saving(LARGE, **hugging_face)[0] == GIB
    assert saving(LARGE, **hugging_face, **two_ranks)[0] == 2 * GIB


def test_a_backward_pass_keeps_what_the_formula_says(tmp_path: Path) -> None:
    terms = phases(config(tmp_path))["backward"]
    # One row of 10 tokens, 4 of them in the response. A layer: 2 x 8 x 4 bytes of norms' inputs, and in fp32 4 x 8 of
    # norms' outputs, 2 x 8 + 2 x 4 of attention, 4 x 16 of the MLP, for each token.
    layer = 10 * (64 + 4 * (32 + 24 + 64))
    last_norm, response_states = 10 * 8 * 8, 4 * 4 * 8
    # Inside the MLP of the last layer: 2 x 8 + 3 x 16 numbers; the tied output layer's gradient waits meanwhile.
    inside, tied = 4 * 10 * (16 + 48), 4 * 10 * 8
    assert terms.activations == 2 * layer + last_norm + response_states + inside
    assert terms.logits == tied
    assert terms.gradients == 4000


def test_fp32_attention_on_a_gpu_keeps_a_key_value_head_for_each_query_head_and_bf16_does_not(tmp_path: Path) -> None:
    """2 layers x 10 tokens x 2 x (8 - 4) numbers of 4 bytes; attention has no scores in memory."""
    on_gpu = {"services__actor__devices": [0]}

    def activations(**changes: Any) -> int:
        return phases(config(tmp_path, **changes))["backward"].activations

    assert activations(**on_gpu) - activations() == 2 * 10 * 2 * (8 - 4) * 4
    assert activations(**on_gpu, actor__dtype="bf16") == activations(actor__dtype="bf16")


def test_each_expert_of_a_token_has_an_input_and_an_output_of_its_own(tmp_path: Path) -> None:
    experts = ModelShape(**{**vars(MODEL), "experts_per_token": 3})
    dense, terms = (phases(config(tmp_path), model=model) for model in (MODEL, experts))
    # In fp32 2 x 3 x 8 numbers for each of 10 tokens, in both layers, and once more inside the MLP of the last one.
    assert terms["backward"].activations - dense["backward"].activations == 3 * (4 * 10 * 48)
    assert terms["backward"].weights == dense["backward"].weights == 4000


def test_ranks_that_divide_positions_keep_a_part_of_the_activations(tmp_path: Path) -> None:
    two = {"services__actor__num_processes": 2, "actor__ppo_mini_batch_size": 4}
    terms = phases(config(tmp_path, **two, actor__ulysses_sequence_parallel_size=2))["backward"]
    # 5 of the 10 tokens of one row; they may be the 4 of its response. The rest as in the test before.
    layer, last_norm, response_states, inside = 5 * (64 + 4 * (32 + 24 + 64)), 5 * 8 * 8, 4 * 4 * 8, 4 * 5 * (16 + 48)
    assert terms.activations == 2 * layer + last_norm + response_states + inside
    one, weights = phases(config(tmp_path, **two))["backward"], 4 * 1000 // 2
    assert (one.weights, terms.weights, one.logits) == (weights, weights, terms.logits)


def test_ranks_that_divide_positions_keep_repeated_keys_and_values_but_store_none_of_them(tmp_path: Path) -> None:
    four, with_heads = {"services__actor__num_processes": 4}, ModelShape(**{**vars(MODEL), "head_dim": 2})
    ranks = config(tmp_path, **four, actor__ulysses_sequence_parallel_size=4, actor__ppo_mini_batch_size=4)
    whole, repeated = (phases(ranks, model=model) for model in (MODEL, with_heads))
    # 3 of 10 tokens on a rank; 2 key-value heads of dimension 2 become 4, in both layers.
    assert repeated["backward"].activations - whole["backward"].activations == 2 * 3 * 4 * 2 * (8 - 4)
    assert repeated["generate"] == whole["generate"]
    alone = config(tmp_path, **four, actor__ppo_mini_batch_size=4)
    assert phases(alone, model=MODEL) == phases(alone, model=with_heads)


def test_logits_are_the_largest_term_of_a_large_vocabulary(tmp_path: Path) -> None:
    wide = ModelShape(**{**vars(MODEL), "vocabulary": 10_000})
    terms = phases(config(tmp_path), model=wide)["backward"]
    assert terms.largest == "process", "of a rank that has no model yet, and this one is tiny"
    assert terms.logits > max(terms.weights, terms.gradients, terms.optimizer, terms.activations)
    assert terms.logits == 12 * 4 * 10_000 + 8 * 10_000 * 8
    # No more than 2^27 logits at once.
    many = phases(config(tmp_path, data__max_response_length=50_000), model=wide)["log-probs"]
    assert many.logits == 12 * (134_217_728 // 10_000) * 10_000


def test_gradient_checkpointing_keeps_the_inputs_of_layers_and_one_layer(tmp_path: Path) -> None:
    deep = ModelShape(**{**vars(MODEL), "num_layers": 100, "windows": (None,) * 100})
    whole = phases(config(tmp_path), model=deep)["backward"].activations
    less = phases(config(tmp_path, actor__gradient_checkpointing=True), model=deep)["backward"].activations
    layer, layer_input = 10 * (64 + 4 * (32 + 24 + 64)), 10 * 8 * 4
    assert whole - less == 100 * layer - (100 * layer_input + layer)
    settings = config(tmp_path, actor__gradient_checkpointing="selective")
    assert phases(settings, model=deep)["backward"].activations - less == 100 * 10 * MODEL.attention * 4


def test_the_only_micro_batch_gets_its_gradients_while_activations_go(tmp_path: Path) -> None:
    terms = phases(config(tmp_path, actor__ppo_micro_batch_size_per_gpu=4))
    assert terms["backward"].gradients == 0
    assert terms["optimizer step"].gradients == 4000


def test_generation_holds_keys_and_values_of_all_rows_and_their_logits(tmp_path: Path) -> None:
    long = {"data__max_response_length": 94}
    terms = phases(config(tmp_path, **long))["generate"]
    # 4 rows, 100 + 64 positions, 2 layers, keys and values of 4 numbers.
    assert terms.kv_cache == 4 * 164 * 2 * 2 * 4 * 4
    assert terms.logits == 4 * 10 * (4 + 4 + 8)
    assert phases(config(tmp_path, **long, rollout__max_batch_size=1))["generate"].kv_cache == terms.kv_cache // 4
    dynamic = {"algorithm__filter_groups__enable": True, "data__gen_batch_size": 6}
    assert phases(config(tmp_path, **long, **dynamic))["generate"].kv_cache == 3 * terms.kv_cache
    window = ModelShape(**{**vars(MODEL), "windows": (3, None)})
    assert phases(config(tmp_path, **long), model=window)["generate"].kv_cache == 4 * (67 + 164) * 2 * 4 * 4


def test_ranks_gather_small_models_whole_and_large_ones_by_layers(tmp_path: Path) -> None:
    of_two = config(tmp_path, services__actor__num_processes=2, actor__dtype="bf16")
    small, large = phases(of_two), phases(of_two, model=LARGE)
    assert small["backward"].gathered_weights == 2 * 1000
    # Micro-batches of small models add up whole gradients, those of large ones shards.
    assert (small["backward"].gradients, large["backward"].gradients) == (4 * 1000, 4 * (1 << 30))
    # While the last layer is gathered, it is there twice, and half of it once more: this rank's shard.
    assert large["generate"].gathered_weights == 2 * (2 << 30) + 3 * (1 << 28)
    assert large["backward"].gathered_weights == 2 * ((1 << 29) + 2 * (1 << 28))
    assert phases(config(tmp_path))["generate"].gathered_weights == 0


def test_the_reference_belongs_to_the_group_that_hosts_it(tmp_path: Path) -> None:
    of_two = config(tmp_path, services__critic__num_processes=2, actor__dtype="bf16")
    hosted = phases(of_two, "critic", reference=MODEL)
    assert {terms.reference for terms in hosted.values()} == {2 * 1000 // 2}
    assert hosted["reference"].gathered_weights == 2 * 1000
    alone = phases(of_two, "critic")
    assert "reference" not in alone
    assert {terms.reference for terms in alone.values()} == {0}


def test_a_reward_model_is_kept_in_its_own_dtype_and_has_no_logits(tmp_path: Path) -> None:
    of_two = config(tmp_path, services__critic__num_processes=2, reward_model={"model": "rm", "dtype": "bf16"})
    hosted = phases(of_two, "critic", reward_model=MODEL)
    assert {terms.reward_model for terms in hosted.values()} == {2 * 1000 // 2}
    assert (hosted["reward"].gathered_weights, hosted["reward"].logits) == (2 * 1000, 0)


def test_vllm_takes_its_share_of_a_gpu_and_gives_it_back(tmp_path: Path) -> None:
    gpu = {"services__actor__devices": [0], "rollout__backend": "vllm"}
    terms = phases(config(tmp_path, **gpu), gpu_bytes=10 * GIB)
    assert (terms["generate"].vllm, terms["backward"].vllm) == (5 * GIB, 2 * GIB)
    kept = phases(config(tmp_path, **gpu, rollout__vllm__sleep_level=0), gpu_bytes=10 * GIB)
    assert kept["backward"].vllm == 5 * GIB
    given = phases(config(tmp_path, **gpu, rollout__vllm__kv_cache_gb=3), gpu_bytes=10 * GIB)
    assert given["generate"].vllm == 3 * GIB + 4 * 1000 + 2 * GIB


@pytest.mark.parametrize(
    ("settings", "gib"),
    [({}, 2), ({"enforce_eager": True}, 1), ({"tensor_model_parallel_size": 2}, 5), ({"sleep_level": 1}, 2)],
    ids=["work space and graphs", "without graphs", "and communicators", "whatever the level"],
)
def test_a_sleeping_engine_keeps_all_but_weights_and_kv_cache(
    tmp_path: Path, settings: dict[str, Any], gib: int
) -> None:
    actor = {"num_processes": 2, "devices": [0, 1]}
    asleep = phases(
        config(tmp_path, services={"actor": actor}, rollout={"backend": "vllm", "vllm": settings}), gpu_bytes=80 * GIB
    )
    assert {terms.vllm for name, terms in asleep.items() if name != "generate"} == {gib * GIB}
    assert phases(config(tmp_path, rollout__backend="vllm"))["backward"].vllm == GIB + 4 * 1000  # awake, on a CPU


def sampling(config: Config, **more: Any) -> Terms:
    """The only phase of a rollout group."""
    group = estimate_group(config, "rollout", MODEL, **more)
    assert (group.role, list(group.phases), group.saving) == ("rollout", ["generate"], None)
    return group.peak


@pytest.mark.parametrize("backend", ["hf", "vllm"])
def test_beside_a_rollout_group_the_actor_does_not_generate(tmp_path: Path, backend: str) -> None:
    changes = {"services__actor__devices": [0], "rollout__backend": backend, "rollout__vllm__sleep_level": 0}
    alone = phases(config(tmp_path, **changes), gpu_bytes=10 * GIB)
    beside = phases(config(tmp_path, **changes, services__rollout={"devices": [1]}), gpu_bytes=10 * GIB)
    assert list(alone) == ["generate", *beside]
    assert {terms.vllm for terms in beside.values()} == {0}


def test_each_rank_of_a_rollout_group_has_whole_weights_and_the_kv_cache_of_its_rows(tmp_path: Path) -> None:
    long = {"data__max_response_length": 94, "services__actor__num_processes": 2}
    one, two = (sampling(config(tmp_path, **long, services__rollout={"num_processes": ranks})) for ranks in (1, 2))
    assert (one.weights, two.weights, two.optimizer, two.gathered_weights) == (4 * 1000, 4 * 1000, 0, 0)
    # 4 rows on one rank, 2 on each of two; 100 + 64 positions, 2 layers, keys and values of 4 numbers.
    assert (one.kv_cache, two.kv_cache) == (4 * 164 * 2 * 2 * 4 * 4, 2 * 164 * 2 * 2 * 4 * 4)
    half = sampling(config(tmp_path, **long, services__rollout={}, actor__dtype="bf16"))
    assert (half.weights, half.gathered_weights, half.kv_cache) == (2 * 1000, 0, one.kv_cache // 2)


def test_vllm_in_a_rollout_group_has_a_share_of_that_groups_gpu_and_no_second_copy(tmp_path: Path) -> None:
    gpus = {"services__actor__num_processes": 2, "services__rollout": {"num_processes": 2, "devices": [0, 1]}}
    vllm = gpus | {"rollout__backend": "vllm", "rollout__vllm__tensor_model_parallel_size": 2}
    share = sampling(config(tmp_path, **vllm), gpu_bytes=10 * GIB)
    assert (share.vllm, share.weights, share.gathered_weights) == (5 * GIB, 0, 0)
    assert sampling(config(tmp_path, **vllm, rollout__vllm__kv_cache_gb=3)).vllm == 3 * GIB + 4 * 1000 // 2 + 5 * GIB
    on_cpu = config(tmp_path, services__actor__devices=[0], services__rollout={}, rollout__backend="vllm")
    assert sampling(on_cpu).vllm == GIB + 4 * 1000


@pytest.mark.parametrize(("share", "rows"), [(0.25, (6, 2)), (0.5, (4, 4)), (0.75, (2, 6))])
def test_two_groups_that_sample_each_have_the_kv_cache_of_their_share(
    tmp_path: Path, share: float, rows: tuple[int, int]
) -> None:
    batch = {"data__train_batch_size": 4, "rollout__n": 2, "rollout__share": share}
    shared = config(tmp_path, **batch, data__max_response_length=94, services__rollout={})
    of_both = (phases(shared)["generate"].kv_cache, sampling(shared).kv_cache)
    # 100 + 64 positions, 2 layers, keys and values of 4 numbers.
    assert of_both == tuple(164 * 2 * 2 * 4 * 4 * count for count in rows)


@pytest.mark.parametrize("backend", ["hf", "vllm"])
def test_on_gpus_of_the_critic_each_group_rests_while_the_other_computes(tmp_path: Path, backend: str) -> None:
    gpus = {f"services__{role}__devices": [gpu] for role, gpu in (("actor", 0), ("critic", 1), ("rollout", 1))}
    shared = config(tmp_path, **gpus, rollout__backend=backend)
    critic = phases(shared, "critic", gpu_bytes=10 * GIB)
    rollout = phases(shared, "rollout", gpu_bytes=10 * GIB)
    process = critic["at rest"].process
    assert critic["at rest"] == Terms(weights=4 * 1000, optimizer=8 * 1000, process=process)
    asleep = 2 * GIB if backend == "vllm" else 0
    assert (list(rollout), rollout["at rest"]) == (["generate", "at rest"], Terms(vllm=asleep, process=process))
    on_its_own = config(tmp_path, **gpus | {"services__rollout__devices": [2]}, rollout__backend=backend)
    assert {"at rest"} == {*critic} - {*phases(on_its_own, "critic", gpu_bytes=10 * GIB)}
    assert "at rest" not in phases(shared, "actor", gpu_bytes=10 * GIB)


@pytest.mark.parametrize(("packed", "tokens"), [(False, 20), (True, 25)])
def test_a_dynamic_micro_batch_fills_its_budget(tmp_path: Path, packed: bool, tokens: int) -> None:
    budget = {"critic__ppo_micro_batch_size_per_gpu": None, "critic__ppo_max_token_len_per_gpu": 25}
    values = phases(config(tmp_path, **budget, critic__use_remove_padding=packed), "critic")["values"]
    assert values.activations == 4 * tokens * (2 * 8 + 3 * 16)


def test_a_response_of_several_contexts_needs_the_memory_of_its_longest_one(tmp_path: Path) -> None:
    """Rows of 6 + 24 tokens with contexts of 10: what computes has one of them, or as many as the budget holds."""
    conversation = {
        "data__max_response_length": 24,
        "rollout__multi_turn__environments": {"default": {"tools": ["mine.py:tool"]}},
        "rollout__multi_turn__max_context_length": 10,
    }
    gspo = {"actor__policy_loss__loss_mode": "gspo"}
    plain = phases(config(tmp_path))
    contexts = phases(config(tmp_path, **conversation))
    whole_rows = phases(config(tmp_path, **conversation, **gspo))
    assert contexts["backward"].activations - plain["backward"].activations == 4 * 6 * 8  # hidden states of responses
    assert contexts["log-probs"].activations == plain["log-probs"].activations
    assert contexts["generate"] == plain["generate"]
    one_row = phases(config(tmp_path, data__max_response_length=24))
    assert whole_rows["backward"] == one_row["backward"]
    assert whole_rows["log-probs"] == contexts["log-probs"]
    budget = {"actor__ppo_micro_batch_size_per_gpu": None, "actor__ppo_max_token_len_per_gpu": 25}
    packed = phases(config(tmp_path, **conversation, **budget))["backward"]
    assert contexts["backward"].activations < packed.activations < one_row["backward"].activations


def test_what_the_critic_alone_reads_counts_for_the_value_model_alone(tmp_path: Path) -> None:
    """Rows of 6 + 4 tokens, before which the value model reads 30 more."""
    privileged = {"critic__privileged_prompt": "{ground_truth}", "critic__max_privileged_length": 30}
    frozen = {"placement__reference": "critic", "algorithm__use_kl_in_reward": True}
    plain = phases(config(tmp_path, **frozen), "critic", reference=MODEL)
    longer = phases(config(tmp_path, **frozen, **privileged), "critic", reference=MODEL)
    assert longer["values"].activations == 4 * plain["values"].activations
    assert longer["backward"].activations > plain["backward"].activations
    assert longer["reference"] == plain["reference"]
    assert phases(config(tmp_path, **frozen, **privileged)) == phases(config(tmp_path, **frozen))
