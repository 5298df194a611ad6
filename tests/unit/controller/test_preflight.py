"""The inputs of a run: every mistake in models, tokenizer and data is one sentence, before the run starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from controller.preflight import check_config, check_models, load_inputs
from splitppo.config import ConfigError
from tests.support.model_folders import EXTERNAL, LETTERS, write_model, write_rows


def test_a_run_reads_tokenizer_and_prompts_and_knows_their_sources(tmp_path: Path, make: Any) -> None:
    val = write_rows(tmp_path / "val.jsonl", "openai/gsm8k")
    inputs = load_inputs(make(data__val_files=val))
    assert inputs.data_sources == {"sort_letters", "openai/gsm8k"}
    assert inputs.prompts.table.num_prompts == 4
    assert inputs.val_prompts is not None
    assert inputs.tokenizer.vocab_size == len(LETTERS)


def test_with_a_reward_model_sources_need_no_function_and_are_not_validated(
    tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rm = write_model(tmp_path / "rm", num_labels=1)
    chat = write_rows(tmp_path / "chat.jsonl", *["hh"] * 4)
    val = write_rows(tmp_path / "val.jsonl", "openai/gsm8k", "hh", "openai/gsm8k")
    with pytest.raises(ConfigError, match="no reward for data_source 'hh'"):
        load_inputs(make(data__train_files=chat))
    config = make(data__train_files=chat, data__val_files=val, reward_model__model=rm)
    inputs = load_inputs(config)
    assert inputs.scored_sources(config.reward) == {"openai/gsm8k"}
    assert inputs.val_prompts is not None
    assert inputs.val_prompts.row_indices.tolist() == [0, 2]
    assert "only reward functions validate, and data_source hh has none" in caplog.text
    assert load_inputs(make(data__train_files=chat, data__val_files=chat, reward_model__model=rm)).val_prompts is None


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


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_moments_are_offloaded_from_gpus_alone(make: Any, role: str) -> None:
    sentence = rf"^{role}\.optimizer_offload needs GPUs \(services\.{role}\.devices\)$"
    with pytest.raises(ConfigError, match=sentence):
        check_config(make(**{f"{role}__optimizer_offload": True}))
    check_config(make(**{f"{role}__optimizer_offload": True, f"services__{role}__devices": [0]}))


def test_layers_that_nothing_here_can_compile_are_refused_where_groups_start_here(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"^critic\.compile: "):
        check_config(make(critic__compile=True))


def test_an_estimator_of_the_users_that_fails_is_refused_before_anything_starts(tmp_path: Path, make: Any) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def mine(rewards_BT, groups_B, scored_BT):\n    return rewards_BT[:, :1], rewards_BT\n")
    with pytest.raises(ConfigError, match=r"mine of .*mine\.py failed: .*expected advantages and returns of shape"):
        check_config(make(algorithm__custom_path=str(mine), algorithm__adv_estimator="mine"))


def test_credentials_that_cannot_be_read_are_refused_before_anything_starts(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"NO_SUCH_VARIABLE"):
        check_config(make(services__security__token_env="NO_SUCH_VARIABLE"))


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


def test_messages_without_a_chat_template_are_warned_of(
    tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    load_inputs(make())
    assert caplog.messages == []
    rows = tmp_path / "chat.jsonl"
    row = {"prompt": [{"role": "user", "content": "ab"}], "data_source": "sort_letters"}
    rows.write_text(f"{json.dumps({**row, 'reward_model': {'ground_truth': 'ab'}})}\n" * 4)
    load_inputs(make(data__train_files=str(rows)))
    assert caplog.messages == [
        f"{rows}, line 1: the prompt has chat messages, but the tokenizer has no chat template: the model reads their"
        " contents alone, one per line (data.chat_template sets a template)"
    ]


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


@pytest.mark.parametrize("nested", [False, True])
def test_vocabularies_that_differ_are_refused_with_both_sizes(tmp_path: Path, make: Any, nested: bool) -> None:
    critic = write_model(tmp_path / "critic", vocab_size=30, nested=nested)
    with pytest.raises(ConfigError, match=r"^actor\.model has a vocabulary of 20 tokens, critic\.model one of 30$"):
        load_inputs(make(critic__model=critic))


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
    longer = {f"{role}__override_config": {"max_position_embeddings": 516} for role in ("actor", "critic")}
    assert check_models(make(**fits | longer | {"data__max_response_length": 4})) == 20


def test_rows_over_the_switch_of_longrope_are_refused(tmp_path: Path, make: Any) -> None:
    rope = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 515}
    model = write_model(tmp_path / "long", max_position_embeddings=4096, **rope)
    assert check_models(make(actor__model=model, data__max_response_length=3)) == 20
    with pytest.raises(ConfigError, match=r"^actor\.model has longrope, .* of over 515 tokens: .* add up to 516$"):
        check_models(make(actor__model=model, data__max_response_length=4))


@pytest.mark.parametrize("key", ["actor", "critic"])
def test_a_vision_language_model_is_refused(tmp_path: Path, make: Any, key: str) -> None:
    model = write_model(tmp_path / "vl", model_type="qwen2_5_vl", vision_config={"depth": 2})
    sentence = rf"^{key}\.model is a vision-language model \(qwen2_5_vl\); only text models can be trained$"
    with pytest.raises(ConfigError, match=sentence):
        check_models(make(**{f"{key}__model": model}))


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


def test_only_ranks_that_are_started_here_must_find_their_engine_here(make: Any) -> None:
    elsewhere = {"rollout__backend": "vllm", "services__actor__devices": [0]}  # no test environment has the CUDA build
    with pytest.raises(ConfigError, match="make setup VLLM=1 LOCK=cuda"):
        check_config(make(**elsewhere))
    check_config(make(**elsewhere, **EXTERNAL))


def test_a_group_that_others_start_needs_an_address(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"^services\.rollout\.address: expected host:port, because"):
        check_config(make(**EXTERNAL, services__rollout={}))


def test_a_folder_for_weights_that_cannot_be_made_is_refused_before_anything_starts(tmp_path: Path, make: Any) -> None:
    (tmp_path / "file").touch()
    there = {"rollout__sync_dir": str(tmp_path / "file" / "weights")}
    with pytest.raises(ConfigError, match=r"^rollout\.sync_dir: cannot use the folder: Not a directory: .*file$"):
        check_config(make(**there, services__rollout={}))
    with pytest.raises(ConfigError, match="File name too long"):
        check_config(make(rollout__sync_dir=f"/{'x' * 300}", checkpoint__weights_save_freq=1))
    check_config(make(**there))  # the actor samples, and publishes nothing
    check_config(make(rollout__sync_dir=str(tmp_path / "new"), services__rollout={}))
    assert not (tmp_path / "new").exists()


def test_an_estimator_without_critic_does_not_read_its_model(make: Any) -> None:
    assert load_inputs(make(algorithm__adv_estimator="grpo", critic__model="/no/such/model"))


def test_an_estimators_file_that_cannot_be_imported_is_refused(tmp_path: Path, make: Any) -> None:
    (tmp_path / "mine.py").write_text("1 / 0\n\ndef mine(rewards_BT): ...\n")
    config = make(algorithm__custom_path=str(tmp_path / "mine.py"), algorithm__adv_estimator="mine")
    with pytest.raises(ConfigError, match=r"key 'algorithm.custom_path': importing .* failed: ZeroDivisionError"):
        load_inputs(config)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path, make: Any) -> None:
    small = write_model(tmp_path / "small", vocab_size=5)
    with pytest.raises(ConfigError, match=r"the tokenizer .* has 10 tokens, actor\.model a vocabulary of 5"):
        load_inputs(make(actor__model=small))


def test_external_services_may_have_their_models_elsewhere(tmp_path: Path, make: Any) -> None:
    tokenizer = write_model(tmp_path / "tokenizer")
    external = {**EXTERNAL, "actor__model": "/there/policy", "data__tokenizer": tokenizer}
    assert load_inputs(make(**external)).tokenizer.vocab_size == len(LETTERS)


def test_a_data_source_without_a_reward_is_named(tmp_path: Path, make: Any) -> None:
    train = write_rows(tmp_path / "odd.jsonl", "sort_letters", "riddles")
    with pytest.raises(ConfigError, match="riddles"):
        load_inputs(make(data__train_files=train))


def test_a_row_of_a_code_set_without_test_cases_is_named(tmp_path: Path, make: Any) -> None:
    train = write_rows(tmp_path / "odd.jsonl", "sort_letters", "apps")
    with pytest.raises(
        ConfigError, match=r"odd\.jsonl, line 2: reward_model\.ground_truth: expected JSON .*, got 'c'$"
    ):
        load_inputs(make(data__train_files=train))


FILTERED = {"rollout__n": 2, "algorithm__filter_groups__enable": True}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "score, seq_reward, seq_final_reward, acc"),
        (
            {"reward__scorers": {"default": [{"name": "gsm8k"}, {"name": "math", "weight": 0.5}]}},
            "score, seq_reward, seq_final_reward, acc, gsm8k_score, math_score",
        ),
    ],
)
def test_a_filter_metric_that_built_in_scorers_do_not_give_is_refused(
    make: Any, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_inputs(make(algorithm__filter_groups__metric="nonsense", **FILTERED, **changes))
    assert str(refused.value) == (
        "algorithm.filter_groups.metric: the scorer of data_source 'sort_letters' gives no numeric field 'nonsense';"
        f" expected one of {expected}"
    )
    for metric in expected.split(", "):
        load_inputs(make(algorithm__filter_groups__metric=metric, **FILTERED, **changes))
    load_inputs(make(algorithm__filter_groups__metric="nonsense"))  # without dynamic sampling nobody reads it


def test_a_filter_metric_may_be_any_field_of_a_users_function(tmp_path: Path, make: Any) -> None:
    (tmp_path / "own.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...")
    own = {"reward__custom_function_path": str(tmp_path / "own.py")}
    load_inputs(make(algorithm__filter_groups__metric="nonsense", **FILTERED, **own))


def write_row(file: Path, data_source: str, **reward_model: Any) -> str:
    file.write_text(json.dumps({"prompt": "abc", "data_source": data_source, "reward_model": reward_model}) + "\n")
    return str(file)


def test_a_row_without_a_ground_truth_is_refused_where_a_function_scores_it(tmp_path: Path, make: Any) -> None:
    own = tmp_path / "own.py"
    own.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...")
    null = write_row(tmp_path / "null.jsonl", "sort_letters", ground_truth=None)
    of_model = write_row(tmp_path / "model.jsonl", "sort_letters", style="model", ground_truth=None)
    one = {"data__train_batch_size": 1, "actor__ppo_mini_batch_size": 1, "critic__ppo_mini_batch_size": 1}
    for changes in ({}, {"reward__custom_function_path": str(own)}):
        with pytest.raises(ConfigError, match=r"null\.jsonl, line 1: column 'reward_model' has no 'ground_truth'"):
            load_inputs(make(data__train_files=null, **one, **changes))
    with pytest.raises(ConfigError, match=r"model\.jsonl, line 1: .* which the scorer of data_source 'sort_letters'"):
        load_inputs(make(data__train_files=of_model, **one))
    load_inputs(make(data__train_files=of_model, **one, reward__custom_function_path=str(own)))


def test_a_judge_and_a_reward_model_need_no_ground_truth(tmp_path: Path, make: Any) -> None:
    null = write_row(tmp_path / "null.jsonl", "hh", ground_truth=None)
    one = {"data__train_batch_size": 1, "actor__ppo_mini_batch_size": 1, "critic__ppo_mini_batch_size": 1}
    judge = {
        "reward__scorers": {"hh": [{"name": "judge"}]},
        "reward__judge": {"url": "http://localhost:1/v1", "model": "m"},
    }
    model = {"reward_model__model": write_model(tmp_path / "rm", num_labels=1)}
    for changes in (judge, model):
        inputs = load_inputs(make(data__train_files=null, **one, **changes))
        assert inputs.prompts.table.rows[0].ground_truth is None


def test_a_missing_reward_file_is_named(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"reward\.custom_function_path.*mine\.py"):
        load_inputs(make(reward__custom_function_path="mine.py"))


# Validation's metrics, and the length of a run.


@pytest.mark.parametrize("key", ["checkpoint__best_metric", "evaluation__early_stop__metric"])
@pytest.mark.parametrize(
    ("metric", "sentence"),
    [
        (
            "val-core/gsm/acc/mean@1",
            "no validation prompt has the data_source of 'val-core/gsm/acc/mean@1'; they have sort_letters",
        ),
        ("val-aux/sort_letters/reward/best@4/mean", "needs 4 responses, but evaluation.n is 2"),
    ],
)
def test_a_metric_that_validation_cannot_give_is_refused(
    tmp_path: Path, make: Any, key: str, metric: str, sentence: str
) -> None:
    val = {"data__val_files": write_rows(tmp_path / "val.jsonl", "sort_letters"), "evaluation__n": 2}
    with pytest.raises(ConfigError, match=f"^{key.replace('__', '.')}: .*{sentence}"):
        load_inputs(make(**val, **{key: metric}))
    for known in ("val/accuracy", "val-core/sort_letters/reward/mean@2", "val-core/sort_letters/reward/best@2/mean"):
        load_inputs(make(**val, **{key: known}))


def test_what_needs_validation_needs_prompts_that_functions_score(tmp_path: Path, make: Any) -> None:
    rm = {"reward_model__model": write_model(tmp_path / "rm", num_labels=1)}
    chat = write_rows(tmp_path / "chat.jsonl", *["hh"] * 4)
    unscored = {"data__train_files": chat, "data__val_files": chat, **rm}
    for setting, key in (
        ({"evaluation__val_only": True}, "evaluation.val_only"),
        ({"checkpoint__best_metric": "val/accuracy"}, "checkpoint.best_metric"),
    ):
        with pytest.raises(ConfigError, match=f"^{key}: .*no validation prompt has a reward function"):
            load_inputs(make(**unscored, **setting))


@pytest.mark.parametrize(
    ("run", "last_step"),
    [
        ({"total_epochs": 3, "total_steps": None}, 6),
        ({"total_epochs": 3, "total_steps": 5}, 5),
        ({"total_epochs": 3, "total_steps": 9}, 6),
        ({"total_steps": 9}, 9),
        ({"total_epochs": 3, "total_steps": None, "stop_after_step": 4}, 4),
    ],
)
def test_a_run_ends_with_its_epochs_or_its_steps_whichever_end_first(
    make: Any, run: dict[str, int | None], last_step: int
) -> None:
    config = make(**{f"run__{key}": value for key, value in run.items()})
    assert load_inputs(config).with_last_step(config).last_step == last_step


def test_a_users_sampler_is_tried_before_anything_starts(tmp_path: Path, make: Any) -> None:
    file = tmp_path / "sampler.py"
    file.write_text(
        "import random\n"
        "class Backwards:\n"
        "    def __init__(self, data_source, data_config, seed): self.rows = len(data_source)\n"
        "    def order(self, epoch): return range(self.rows)[::-1]\n"
        "class Unseeded(Backwards):\n"
        "    def order(self, epoch): return [random.SystemRandom().randrange(4) for _ in range(40)]\n"
    )
    sampler = {"data__sampler__class_path": str(file), "data__train_batch_size": 4}
    inputs = load_inputs(make(**sampler, data__sampler__class_name="Backwards"))
    assert inputs.prompts.batch_at(1).row_indices.tolist() == [3, 2, 1, 0]
    unseeded = make(**sampler | {"data__train_batch_size": 32}, data__sampler__class_name="Unseeded")
    with pytest.raises(ConfigError, match="could not be resumed"):
        load_inputs(unseeded)
