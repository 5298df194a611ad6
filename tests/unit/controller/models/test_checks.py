"""The models of a run: every mistake in their files and sizes is one sentence, before the run starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from controller.models.checks import check_models
from controller.preflight import load_inputs
from splitppo.config import ConfigError
from tests.support.model_folders import EXTERNAL, LETTERS, write_model


@pytest.mark.parametrize("key", ["actor", "critic", "reward_model"])
def test_weights_that_are_missing_or_torn_are_refused_with_their_key(tmp_path: Path, make: Any, key: str) -> None:
    folder = Path(write_model(tmp_path / "other", num_labels=1))
    config = make(**{f"{key}__model": str(folder)})
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(
        ConfigError, match=rf"^{key}\.model: {weights} is torn: it has \d+ bytes \(.*file not fully covered\)$"
    ):
        load_inputs(config)
    weights.unlink()
    with pytest.raises(ConfigError, match=rf"^{key}\.model: {folder} has no weights: expected model\.safetensors or"):
        load_inputs(config)


@pytest.mark.parametrize("key", ["actor", "critic"])
def test_an_output_layer_that_a_policys_config_ties_must_be_the_embedding(tmp_path: Path, make: Any, key: str) -> None:
    folder = Path(write_model(tmp_path / "other"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 20, "tie_word_embeddings": True}))
    rows = {"model.embed_tokens.weight": np.zeros((2, 2)), "lm_head.weight": np.ones((2, 2))}
    save_file(rows, folder / "model.safetensors")
    config = make(**{f"{key}__model": str(folder)})
    if key == "critic":  # a value model has no output layer
        load_inputs(config)
        return
    with pytest.raises(ConfigError, match=r"^actor\.model: config\.json in .* ties lm_head\.weight to"):
        load_inputs(config)


@pytest.mark.parametrize("key", ["actor", "critic"])
def test_a_missing_model_folder_is_named_with_its_key(make: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model folder /no/such/model does not exist \(key {key}\.model\)$"):
        load_inputs(make(**{f"{key}__model": "/no/such/model"}))


def test_a_folder_without_a_config_is_no_model(tmp_path: Path, make: Any) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"^critic\.model: .*empty has no config\.json$"):
        load_inputs(make(critic__model=str(tmp_path / "empty")))


@pytest.mark.parametrize("given", ["", "checkpoints/global_step_7", "checkpoints/global_step_7/actor"])
def test_a_checkpoint_of_a_run_is_no_model_and_the_sentence_says_how_to_make_one_of_it(
    tmp_path: Path, make: Any, given: str
) -> None:
    role_folder = tmp_path / "run/checkpoints/global_step_7/actor"
    role_folder.mkdir(parents=True)
    (role_folder / "manifest.json").write_text("{}")
    sentence = f"it is a checkpoint of a run; python -m services.engine.export --checkpoint {role_folder} --output DIR"
    with pytest.raises(ConfigError, match=rf"^actor\.model: .* has no config\.json: {sentence} makes a model of it$"):
        check_models(make(actor__model=str(tmp_path / "run" / given)))


def test_an_adapter_that_does_not_fit_is_refused_before_anything_starts(tmp_path: Path, make: Any) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    wanted = {"actor__lora_rank": 16, "actor__lora_adapter_path": str(adapter)}
    with pytest.raises(ConfigError, match=f"actor.lora_adapter_path: {adapter} has no adapter_config.json"):
        check_models(make(**wanted))
    (adapter / "adapter_model.safetensors").touch()
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"adapter_config\.json describes no adapter: Input should be"):
        check_models(make(**wanted))
    described = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    with pytest.raises(
        ConfigError, match=r"^actor\.lora_adapter_path has rank 8, actor\.lora_rank is 16; set it to 8$"
    ):
        check_models(make(**wanted))
    wanted["actor__lora_rank"] = 8
    assert check_models(make(**wanted)) == 20
    (adapter / "adapter_config.json").write_text(json.dumps({**described, "use_dora": True}))
    with pytest.raises(ConfigError, match=r"^actor\.lora_adapter_path uses use_dora, which is not supported$"):
        check_models(make(**wanted))


def test_a_target_layer_that_a_model_does_not_have_is_refused_with_those_that_it_has(tmp_path: Path, make: Any) -> None:
    folder = write_model(tmp_path / "policy")
    names = ["embed_tokens", "layers.0.self_attn.q_proj", "layers.0.mlp.up_proj"]
    names += ["layers.0.mlp.gate", "layers.0.mlp.experts.0.w1"]  # experts and their router get no adapter
    weights = {f"model.{name}.weight": np.ones((2, 2), np.float32) for name in names}
    save_file(weights, tmp_path / "policy" / "model.safetensors")
    wanted = {"actor__model": folder, "actor__lora_rank": 4}
    check_models(make(**wanted, actor__target_modules=["q_proj", "mlp.up_proj"]))
    check_models(make(**wanted, actor__target_modules=".*q_prj"))  # the group tells what a pattern matches
    with pytest.raises(ConfigError) as refused:
        check_models(make(**wanted, actor__target_modules=["q_prj"]))
    assert str(refused.value) == f"actor.target_modules: q_prj is no linear layer of {folder}; it has up_proj, q_proj"


def test_weights_that_freeze_does_not_find_or_all_are_refused_before_anything_starts(tmp_path: Path, make: Any) -> None:
    folder = write_model(tmp_path / "policy", tie_word_embeddings=True)
    names = ["embed_tokens", "layers.0.self_attn.q_proj", "layers.0.mlp.up_proj"]
    weights = {f"model.{name}.weight": np.ones((2, 2), np.float32) for name in names}
    save_file(weights, tmp_path / "policy" / "model.safetensors")

    def freeze(role: str, *patterns: str, **more: Any) -> Any:
        return make(actor__model=folder, critic__model=folder, **{f"{role}__freeze": list(patterns), **more})

    for fits in (
        freeze("actor", r"\.self_attn\.", "lm_head"),
        freeze("critic", ""),  # its new head learns
        freeze("actor", "q_proj.lora_A", actor__lora_rank=4),
    ):
        check_models(fits)
    near = rf"matches no weight of {folder}; near is self_attn \(as in model\.layers\.0\.self_attn\.q_proj\.weight\)"
    with pytest.raises(ConfigError, match=rf"^critic\.freeze: self_atn {near}$"):
        check_models(freeze("critic", "self_atn"))
    with pytest.raises(
        ConfigError, match=rf"^critic\.freeze: score matches no weight of {folder}; parts of their names"
    ):
        check_models(freeze("critic", "score"))
    with pytest.raises(ConfigError, match=rf"^actor\.freeze freezes all weights of {folder}: nothing would learn"):
        check_models(freeze("actor", "embed", "layers"))
    with pytest.raises(ConfigError, match=r"^actor\.freeze: embed_tokens matches no weight of the adapters of "):
        check_models(freeze("actor", "embed_tokens", actor__lora_rank=4))
    zeros = "model.layers.0.self_attn.q_proj.lora_B.weight, which is 0 in a new adapter"
    with pytest.raises(ConfigError, match=rf"^critic\.freeze freezes {re.escape(zeros)}: it would never change "):
        check_models(freeze("critic", "self_attn", critic__lora_rank=4))
    with pytest.raises(
        ConfigError, match=r"actor\.freeze'?: expected regular expressions, got '\(' \(missing \), unterm"
    ):
        freeze("actor", "(")


def test_freeze_may_name_what_an_adapter_brings(tmp_path: Path, make: Any) -> None:
    folder = write_model(tmp_path / "value")
    layer = "layers.0.mlp.up_proj"
    save_file({f"model.{layer}.weight": np.ones((2, 2), np.float32)}, tmp_path / "value" / "model.safetensors")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    described = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "modules_to_save": ["score"]}
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    parts = [f"model.{layer}.lora_A.weight", f"model.{layer}.lora_B.weight"]

    def freeze(*patterns: str, saved: tuple[str, ...]) -> Any:
        weights = {f"base_model.model.{name}": np.ones((2, 2), np.float32) for name in (*parts, *saved)}
        save_file(weights, adapter / "adapter_model.safetensors")
        begun = {"lora_rank": 1, "lora_alpha": 1, "lora_adapter_path": str(adapter), "freeze": list(patterns)}
        return make(critic__model=folder, **{f"critic__{key}": value for key, value in begun.items()})

    check_models(freeze("lora_B", "score", saved=("score.weight",)))
    check_models(freeze("lora", saved=()))  # the new head learns
    with pytest.raises(ConfigError, match=r"^critic\.freeze: score matches no weight of the adapters of "):
        check_models(freeze("score", saved=()))
    with pytest.raises(ConfigError, match=r"^critic\.freeze freezes all weights of the adapters of "):
        check_models(freeze("lora", "score", saved=("score.weight",)))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("vocab_size", [len(LETTERS), 19, 30])
def test_a_critic_may_have_any_embedding_with_a_row_for_each_token(
    tmp_path: Path, make: Any, vocab_size: int, nested: bool
) -> None:
    load_inputs(make(critic__model=write_model(tmp_path / "critic", vocab_size=vocab_size, nested=nested)))
    smaller = write_model(tmp_path / "smaller", vocab_size=len(LETTERS) - 1, nested=nested)
    sentence = r"^the tokenizer \(data\.tokenizer\) has 10 tokens, of ids up to 9, critic\.model a vocabulary of 9$"
    with pytest.raises(ConfigError, match=sentence):
        load_inputs(make(critic__model=smaller))


@pytest.mark.parametrize(
    ("vocabulary", "difference"),
    [
        ({letter: number for number, letter in enumerate(LETTERS)}, None),
        ({letter: number for number, letter in enumerate(f"{LETTERS}k")}, None),  # it may have more
        ({letter: number for number, letter in enumerate(LETTERS[:-1])}, None),  # or fewer
        ({letter: number for number, letter in enumerate("acbdefghij")}, "token 'b' has id 2 there, and id 1 here"),
        (
            {letter: number for number, letter in enumerate("axcdefghij")},
            "token 'b' has no id there, where 'x' has id 1",
        ),
    ],
)
def test_a_critic_that_takes_an_id_for_another_token_is_refused(
    tmp_path: Path, make: Any, vocabulary: dict[str, int], difference: str | None
) -> None:
    critic = write_model(tmp_path / "critic")
    Tokenizer(WordLevel(vocabulary, unk_token="a")).save(str(tmp_path / "critic/tokenizer.json"))
    if difference is None:
        load_inputs(make(critic__model=critic))
        (tmp_path / "critic/tokenizer.json").unlink()
        load_inputs(make(critic__model=critic))
        return
    sentence = f"critic.model: {critic} has another tokenizer than the policy (data.tokenizer): {difference}"
    with pytest.raises(ConfigError) as refused:
        load_inputs(make(critic__model=critic))
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("key", ["actor", "critic"])
@pytest.mark.parametrize("backend", ["hf", "vllm"])
@pytest.mark.parametrize("nested", [False, True])
def test_rows_longer_than_a_models_positions_are_refused(
    tmp_path: Path, make: Any, key: str, backend: str, nested: bool
) -> None:
    model = write_model(tmp_path / "short", nested=nested, max_position_embeddings=515)
    fits = {f"{key}__model": model, "rollout__backend": backend, "data__max_response_length": 3}
    assert check_models(make(**fits)) == 20
    with pytest.raises(ConfigError, match=rf"^{key}\.model has max_position_embeddings 515, .*\(516 tokens\)"):
        check_models(make(**fits | {"data__max_response_length": 4}))
    privileged = {"critic__privileged_prompt": "{ground_truth}", "critic__max_privileged_length": 1}
    if key == "critic":  # its rows are longer by what it alone reads
        with pytest.raises(ConfigError, match=r"\+ critic\.max_privileged_length \(516 tokens\)"):
            check_models(make(**fits | privileged))
    longer = {f"{role}__override_config": {"max_position_embeddings": 516} for role in ("actor", "critic")}
    assert check_models(make(**fits | longer | {"data__max_response_length": 4})) == 20


def test_rows_over_the_switch_of_longrope_are_refused(tmp_path: Path, make: Any) -> None:
    rope = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 515}
    model = write_model(tmp_path / "long", max_position_embeddings=4096, **rope)
    assert check_models(make(actor__model=model, data__max_response_length=3)) == 20
    with pytest.raises(
        ConfigError, match=r"^actor\.model has longrope, .* of over 515 tokens: .*max_response_length \(516\)$"
    ):
        check_models(make(actor__model=model, data__max_response_length=4))


@pytest.mark.parametrize("key", ["actor", "critic", "teacher"])
def test_a_vision_language_model_of_another_family_or_use_is_refused(tmp_path: Path, make: Any, key: str) -> None:
    known = write_model(tmp_path / "known", model_type="qwen2_5_vl", vision_config={"depth": 2})
    other = write_model(tmp_path / "other", model_type="qwen2_vl", vision_config={"depth": 2})
    model, kind = (known, "qwen2_5_vl") if key == "teacher" else (other, "qwen2_vl")
    sentence = (
        rf"^{key}\.model is a vision-language model \({kind}\); only text models can be used here, and qwen2_5_vl"
    )
    with pytest.raises(ConfigError, match=sentence):
        check_models(make(**{f"{key}__model": model}))
    if key != "teacher":
        check_models(make(**{f"{key}__model": known}))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_model_len": 1025}, r"max_model_len \(1025\) must not exceed .* actor\.model \(1024\); lower rollout"),
        (
            {"tensor_model_parallel_size": 4},
            r"vllm\.tensor_model_parallel_size \(4\) must divide the 6 attention heads of actor\.model: 1, 2, 3 or 6",
        ),
        (
            {"tensor_model_parallel_size": 3},
            r"size \(3\) must divide the 2 key-value heads of actor\.model, or be a multiple of them",
        ),
    ],
)
def test_what_vllm_could_not_load_is_refused_with_both_numbers_and_the_key(
    tmp_path: Path, make: Any, changes: dict[str, int], sentence: str
) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    model = write_model(tmp_path / "heads", max_position_embeddings=1024, **heads)
    with pytest.raises(ConfigError, match=sentence):
        check_models(make(actor__model=model, rollout__backend="vllm", rollout__vllm=changes))
    assert check_models(make(actor__model=model, rollout__backend="hf", rollout__vllm=changes)) == 20


@pytest.mark.parametrize("ranks", [1, 2, 6])
def test_ranks_of_an_engine_may_share_a_key_value_head(tmp_path: Path, make: Any, ranks: int) -> None:
    model = write_model(tmp_path / "heads", num_attention_heads=6, num_key_value_heads=2)
    vllm = {"tensor_model_parallel_size": ranks}
    assert check_models(make(actor__model=model, rollout__backend="vllm", rollout__vllm=vllm)) == 20


@pytest.mark.parametrize(
    ("size", "changes", "sentence"),
    [
        (4, {}, r"^actor\.ulysses_\w+_size \(4\) must divide the 6 attention heads of actor\.model: 1, 2, 3 or 6$"),
        (3, {}, r"^actor\.ulysses_\w+_size \(3\) must divide the 2 key-value heads of actor\.model, or be a multiple"),
        (2, {"actor__use_remove_padding": False}, r"\(2\) needs packed rows: set actor\.use_remove_padding to true$"),
        (
            6,
            {"teacher__model": "odd"},
            r"^actor\.\w+ \(6\) must divide the 4 attention heads of teacher\.model: 1, 2 or 4$",
        ),
    ],
)
def test_positions_that_ranks_cannot_divide_are_refused_with_the_key_and_what_fits(
    tmp_path: Path, make: Any, size: int, changes: dict[str, Any], sentence: str
) -> None:
    model = write_model(tmp_path / "heads", num_attention_heads=6, num_key_value_heads=2)
    odd = write_model(tmp_path / "odd", num_attention_heads=4, num_key_value_heads=4)
    options = {"actor__model": model, "critic__model": odd, "services__actor__num_processes": 12}
    changes = {key: odd if value == "odd" else value for key, value in changes.items()}
    of_teacher = {"placement__teacher": "actor"} if "teacher__model" in changes else {}
    with pytest.raises(ConfigError, match=sentence):
        check_models(make(**options, **changes, **of_teacher, actor__ulysses_sequence_parallel_size=size))
    for fits in (1, 2, 6):
        check_models(make(**options, actor__ulysses_sequence_parallel_size=fits))


def test_external_services_may_have_their_models_elsewhere(tmp_path: Path, make: Any) -> None:
    tokenizer = write_model(tmp_path / "tokenizer")
    external = {**EXTERNAL, "actor__model": "/there/policy", "data__tokenizer": tokenizer}
    assert load_inputs(make(**external)).tokenizer.vocab_size == len(LETTERS)


def test_a_critic_that_has_learned_with_a_privileged_text_is_no_reward_model(tmp_path: Path, make: Any) -> None:
    checkpoint = tmp_path / "run/checkpoints/global_step_4"
    critic = write_model(checkpoint / "critic/huggingface")
    policy = write_model(checkpoint / "actor/huggingface")
    stored = tmp_path / "run/config.yaml"
    for text in ("critic: {privileged_prompt: null}\n", "critic: {lr: 1.0}\n", "- no configuration\n", "{"):
        stored.write_text(text)
        check_models(make(reward_model__model=critic))
    stored.write_text("critic: {privileged_prompt: 'Answer: {ground_truth}'}\n")
    check_models(make(reward_model__model=policy))
    with pytest.raises(ConfigError, match=r"^reward_model\.model: .* is a critic that has learned with critic\.priv"):
        check_models(make(reward_model__model=critic))
