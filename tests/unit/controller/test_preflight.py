"""The inputs of a run: they are loaded, and a mistake in keys or data is one sentence, before the run starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from controller.preflight import check_config, load_inputs
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
    assert inputs.scored_sources(config) == {"openai/gsm8k"}
    assert inputs.val_prompts is not None
    assert inputs.val_prompts.row_indices.tolist() == [0, 2]
    assert "only reward functions validate, and data_source hh has none" in caplog.text
    assert load_inputs(make(data__train_files=chat, data__val_files=chat, reward_model__model=rm)).val_prompts is None


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
    with pytest.raises(
        ConfigError, match=r"the tokenizer .* has 10 tokens, of ids up to 9, actor\.model a vocabulary of 5"
    ):
        load_inputs(make(actor__model=small))


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
