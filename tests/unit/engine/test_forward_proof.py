"""The engine proves at its start that it computes what the model itself does, and refuses any other model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from services.engine.forward_proof import Difference, check_difference, prove_forward, rows_of
from services.engine.frozen_model import FrozenModel
from services.engine.inference import check_sequence_ranks
from services.engine.model.forward import policy_forward
from services.engine.model.loading import for_generation
from services.engine.model.weights import Kind
from services.engine.strategies.registry import build_strategy
from services.rollout.hf_backend.decoding_proof import prove_decoding
from splitppo.batch import Batch
from splitppo.config import ComputedModelConfig
from tests.support.engines import CPU, make_engine, silent
from tests.support.models import SIZES, save_policy, save_random, save_reward_model, save_value_model
from tests.support.vision_models import FAMILIES, Family, save_vision_policy
from tools.architectures.tiny_configs import tiny_config

STATE_SPACE = {"vocab_size": SIZES["vocab_size"], "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
SPECIAL = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
FALCON_H1 = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
SINKS = {"num_local_experts": 4, "head_dim": 8, "sliding_window": 5, "tie_word_embeddings": False}
LONGROPE = {
    "tie_word_embeddings": False,
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    },
}


def save(folder: Path, name: str, **fields: Any) -> Path:
    """Writes a random causal language model of transformers, of the sizes of tests."""
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **fields})
    return save_random(getattr(transformers, f"{name}ForCausalLM"), config, folder)


def frozen(folder: Path, kind: Kind = "policy", **settings: Any) -> FrozenModel:
    return FrozenModel(ComputedModelConfig(model=str(folder), **settings), kind=kind, device=CPU)


def own_log_probs(folder: Path, prompt: Any, response: Any) -> Any:
    """The log-probs of a response by the model of transformers itself, alone and with eager attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    with torch.no_grad():
        log_probs_SV = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    return log_probs_SV[torch.arange(len(prompt) - 1, len(ids) - 1), ids[len(prompt) :]].numpy()


@pytest.mark.promise("the model of transformers")
@pytest.mark.parametrize("name", ["Doge", "ModernBertDecoder"])
@pytest.mark.parametrize("packed", [True, False])
def test_a_model_of_which_the_engine_leaves_something_out_is_refused_with_its_type_and_the_difference(
    tmp_path: Path, name: str, packed: bool
) -> None:
    fields: dict[str, Any] = {"Doge": {"keep_window_size": 4}, "ModernBertDecoder": {"bos_token_id": 2}}[name]
    folder = save(tmp_path, name, **fields)
    sentence = r"cannot compute with (doge|modernbert-decoder) in (packed|padded) rows: .* differ by [\d.]+ on average"
    with pytest.raises(ValueError, match=sentence):
        make_engine(folder, use_remove_padding=packed)


def test_a_value_model_and_a_reward_model_are_proved_too(tmp_path: Path) -> None:
    folder = save_random(
        transformers.BertForTokenClassification,
        transformers.BertConfig(**{**SIZES, "num_key_value_heads": None}, is_decoder=False, num_labels=1),
        tmp_path / "sees_what_comes_after",
    )
    with pytest.raises(ValueError, match=r"bert in p(acked|added) rows: the values are not those of the model itself"):
        frozen(folder, "value")
    policy = save_random(
        transformers.BertLMHeadModel,
        transformers.BertConfig(**{**SIZES, "num_key_value_heads": None}, is_decoder=False),
        tmp_path / "without_head",
    )
    with pytest.raises(ValueError, match=r"bert in p(acked|added) rows: the values are not those of the model itself"):
        frozen(policy, "value")  # with its new head, which is 0, all values are the same
    assert frozen(save_value_model(tmp_path / "value"), "value").proved.largest < 1e-5
    assert frozen(save_reward_model(tmp_path / "reward"), "reward").proved.largest < 1e-5


def test_a_new_value_head_is_zero_again_after_the_proof(tmp_path: Path) -> None:
    model = frozen(save_policy(tmp_path), "value").model
    assert not model.score.weight.any()
    assert not model.score.bias.any()


def test_a_forward_that_cannot_be_run_is_one_sentence(tmp_path: Path) -> None:
    folder = save_random(transformers.Llama4ForCausalLM, tiny_config("llama4_text"), tmp_path)
    with pytest.raises(ValueError, match=r"^[^\n]*cannot compute with llama4_text in padded rows: [^\n]+$"):
        frozen(folder)


@pytest.mark.promise("the model of transformers")
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("FalconH1", {**FALCON_H1, "lm_head_multiplier": 0.039}),
        ("GptOss", SINKS),  # attention sinks
        ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
        ("Phi3", LONGROPE),
    ],
)
def test_log_probs_are_those_of_the_model_itself_whatever_rows_are_computed_together(
    tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    folder = save(tmp_path, name, **fields)
    rng = np.random.default_rng(0)
    rows = [(rng.integers(3, 50, p), rng.integers(3, 50, r)) for p, r in ((3, 4), (12, 30), (4, 5), (10, 12))]
    expected = [own_log_probs(folder, *row) for row in rows]
    prompts, responses = zip(*rows, strict=True)
    batch = Batch.from_rows(prompts=prompts, responses=responses)
    for tokens in (1000, 30, 10):
        engine = make_engine(folder, ppo_max_token_len_per_gpu=tokens)
        computed = engine.compute(batch, policy_forward(1.0), outputs=("log_probs",), progress=silent)["log_probs"]
        for actual, wanted in zip(computed.rows(), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, atol=1e-5)


def test_sinks_and_rotary_factors_of_whole_rows_are_not_divided_among_ranks(tmp_path: Path) -> None:
    for name, fields, reason in (("GptOss", SINKS, "needs packed rows"), ("Phi3", LONGROPE, "longrope")):
        model = frozen(save(tmp_path / name, name, **fields))
        config = ComputedModelConfig(model=name)
        with pytest.raises(ValueError, match=rf"ulysses_sequence_parallel_size \(2\).*{reason}"):
            check_sequence_ranks(config, model.model, model.limits, 2)
    with pytest.raises(ValueError, match="use_remove_padding: rows of GptOssForCausalLM cannot be packed"):
        frozen(tmp_path / "GptOss", use_remove_padding=True)


def test_layers_with_heads_of_their_own_are_computed_and_counted(tmp_path: Path) -> None:
    config = tiny_config("gemma4_text")  # heads of 8 in two layers, and of 16 in two
    engine = make_engine(save_random(transformers.Gemma4ForCausalLM, config, tmp_path))
    assert engine.flops_meter._shape.attention_width == 2 * 4 * 8 + 2 * 4 * 16


def test_a_model_that_computes_otherwise_in_training_can_be_frozen_but_not_trained(tmp_path: Path) -> None:
    held = frozen(save_policy(tmp_path))
    held.model.model.norm.register_forward_hook(lambda norm, _, output: output * (1.1 if norm.training else 1.0))
    options: Any = {"strategy": build_strategy(CPU), "limits": held.limits, "device": CPU, "dtype": "fp32"}
    assert prove_forward(held.model, "policy", "noisy", **options).largest < 1e-5
    with pytest.raises(
        ValueError, match=r"noisy: .* rows: in training the log-probs are not those of the model itself"
    ):
        prove_forward(held.model, "policy", "noisy", **options, is_trained=True)
    assert not held.model.training


def test_experts_that_are_drawn_at_random_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"phimoe in packed rows: .* not those of the model itself"):
        make_engine(save_random(transformers.PhimoeForCausalLM, tiny_config("phimoe"), tmp_path))


def test_a_model_whose_rows_see_what_comes_behind_them_is_refused(tmp_path: Path) -> None:
    # Its config has -1 positions, which is no limit.
    with pytest.raises(ValueError, match=r"xlnet in padded rows: .* not those of the model itself"):
        make_engine(save_random(transformers.XLNetLMHeadModel, tiny_config("xlnet"), tmp_path))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rounding_is_no_difference(tmp_path: Path, dtype: str) -> None:
    folder = save_policy(tmp_path, num_hidden_layers=12)
    found = frozen(folder, dtype=dtype).proved
    assert (found.largest > 1e-3) is (dtype == "bf16")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("bias", [-1e9, float("-inf")])
def test_a_logit_that_forbids_a_token_hides_no_difference(tmp_path: Path, dtype: str, bias: float) -> None:
    config = transformers.BertConfig(**{**SIZES, "num_key_value_heads": None}, is_decoder=True)
    folder = save_random(transformers.BertLMHeadModel, config, tmp_path)
    weights = load_file(folder / "model.safetensors")
    [name] = [name for name in weights if name.endswith("predictions.bias")]
    weights[name][0] = bias
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"bert in .* rows: the log-probs are not those of the model itself"):
        frozen(folder, dtype=dtype)


def test_weights_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    weights = load_file(save_policy(tmp_path) / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"own forward gives what is no number: are its weights numbers\?$"):
        frozen(tmp_path)


def test_a_token_that_is_forbidden_is_not_compared() -> None:
    bound = Difference(1e-4, 1e-4)
    own = torch.tensor([-1e9, -1.0, float("-inf")])
    assert check_difference(torch.tensor([-1.001e9, -1.0, -1e9]), own, "policy", bound, "it") == Difference(0.0, 0.0)
    with pytest.raises(ValueError, match="it: they differ"):
        check_difference(torch.tensor([-1e9, float("nan")]), torch.tensor([-1e9, -1.0]), "policy", bound, "it")
    with pytest.raises(ValueError, match="it: they differ"):  # values have no such bound
        check_difference(torch.tensor([-2e4]), torch.tensor([-3e4]), "value", bound, "it")
    with pytest.raises(ValueError, match="it: they differ"):
        check_difference(torch.tensor([-1.0]), torch.tensor([float("nan")]), "policy", bound, "it")


def test_the_rows_have_no_special_ids_and_fit_into_the_positions() -> None:
    config = transformers.Qwen2Config(**{**SIZES, "pad_token_id": 7, "bos_token_id": 9, "max_position_embeddings": 12})
    rows = rows_of(config, "policy")
    tokens = np.concatenate([ids for row in rows for ids in (row.prompt, row.response)])
    assert not set(tokens.tolist()) & {1, 7, 9}
    assert all(len(row.prompt) and len(row.response) for row in rows)
    assert max(len(row.prompt) + len(row.response) for row in rows) <= 12


def test_what_is_no_number_on_one_side_is_infinitely_far() -> None:
    nan, inf = float("nan"), float("inf")
    assert Difference.of(torch.tensor([1.0, nan]), torch.tensor([1.0, 2.0])).largest == inf
    assert Difference.of(torch.tensor([nan]), torch.tensor([nan])).largest == inf
    assert Difference.of(torch.tensor([-inf, 1.5]), torch.tensor([-inf, 1.0])) == Difference(0.25, 0.5)


# Decoding.


def decode(folder: Path) -> Callable[[], None]:
    model = frozen(folder, use_remove_padding=False).model
    return lambda: prove_decoding(lambda: for_generation(model), str(folder), CPU, "fp32")


@pytest.mark.parametrize("positions", [2, 4, 8, 16])
def test_decoding_is_proved_however_few_positions_there_are(tmp_path: Path, positions: int) -> None:
    decode(save_policy(tmp_path, max_position_embeddings=positions))()


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_is_proved_with_images(tmp_path: Path, family: Family) -> None:
    decode(save_vision_policy(tmp_path, family))()


@pytest.mark.parametrize("name", ["Mamba", "Mamba2"])
def test_a_model_of_states_decodes_with_them(tmp_path: Path, name: str) -> None:
    heads = {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8} if name == "Mamba2" else {}
    config = getattr(transformers, f"{name}Config")(**STATE_SPACE, **SPECIAL, **heads)
    decode(save_random(getattr(transformers, f"{name}ForCausalLM"), config, tmp_path))()


def test_a_model_whose_decoding_is_another_one_than_its_forward_is_refused(tmp_path: Path) -> None:
    refused = decode(save_random(transformers.BartForCausalLM, tiny_config("bart"), tmp_path))
    with pytest.raises(ValueError, match=r"backend hf cannot sample with bart: its decoding gives other log-probs"):
        refused()
