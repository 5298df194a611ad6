"""Starts that are refused: exit status 2, one sentence, and no run folder that was not there before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.__main__ import main
from controller.run.folder import RunFolder
from splitppo.config import ConfigError, load_config
from tests.support.fake_gpus import put_gpus
from tests.support.groups import free_address
from tests.support.model_folders import write_model, write_rows

pytestmark = pytest.mark.slow

# By what is refused: the overrides, and a part of the sentence. {} is a folder with files that cannot be used.
KEYS = {
    "an unknown key": (["actor.learning_rate=1"], "unknown key 'actor.learning_rate'"),
    "numbers": (["actor.ppo_mini_batch_size=3"], "must be a multiple of actor.ppo_mini_batch_size (3)"),
    "an estimator": (["algorithm.custom_path={}/broken.py", "algorithm.adv_estimator=mine"], "broken.py"),
    "a token": (["services.security.token_env=NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
    "a checkpoint": (["run.resume={}"], "is no complete checkpoint"),
    "a tracker": (["tracking.trackers=[tensorboard]", "tracking.python={}/none"], "tracking.python: cannot be started"),
}
# Where groups start here, before one is started.
HERE = {
    "a model": (["actor.model={}/none"], "does not exist (key actor.model)"),
    "weights": (["critic.model={}/no_weights"], "has no weights"),
    "an adapter": (["actor.lora_rank=2", "actor.lora_adapter_path={}"], "has no adapter_config.json"),
    "a loss": (["actor.policy_loss.custom_path={}/broken.py", "actor.policy_loss.loss_mode=mine"], "broken.py"),
    "offloaded moments": (["actor.optimizer_offload=true"], "needs GPUs"),
    "a folder of weights": (["checkpoint.weights_save_freq=1", "rollout.sync_dir=/dev/null/x"], "rollout.sync_dir"),
    "devices": (["services.actor.devices=[3]", "services.critic.devices=[0]"], "services.actor.devices"),
}
# While groups may load their models.
INPUTS = {
    "a tokenizer": (["data.tokenizer={}/none"], "data.tokenizer"),
    "a template": (["data.chat_template={}/none.jinja"], "none.jinja"),
    "a file of prompts": (["data.train_files={}/none.jsonl"], "data.train_files: no such file"),
    "rows": (["data.train_files={}/broken.jsonl"], "broken.jsonl"),
    "few prompts": (["data.train_batch_size=40"], "is larger than the number of training prompts (4)"),
    "prompts for validation": (["data.val_files={}/none.jsonl"], "data.val_files: no such file"),
    "a sampler": (["data.sampler.class_path={}/broken.py", "data.sampler.class_name=Mine"], "broken.py"),
    "a metric": (["evaluation.early_stop={metric: val-core/x/acc/mean@1, patience: 1}"], "early_stop.metric"),
    "a reward function": (["reward.custom_function_path={}/broken.py"], "broken.py"),
    "a scorer": (["reward.scorers={default: [{name: sort_leters}]}"], "is no scorer"),
    "rows that nothing scores": (["data.train_files={}/unscored.jsonl"], "no reward for data_source 'unscored'"),
    "rows without a truth": (["data.train_files={}/no_truth.jsonl"], "no 'ground_truth'"),
    "an environment": (
        ["rollout.multi_turn.environments={default: {path: {}/broken.py, name: Game}}", "rollout.stream_groups=1"],
        "broken.py",
    ),
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    write_model(folder / "model")
    write_model(folder / "no_weights")
    (folder / "no_weights" / "model.safetensors").unlink()
    write_rows(folder / "train.jsonl", *["sort_letters"] * 4)
    write_rows(folder / "unscored.jsonl", *["unscored"] * 4)
    without_truth = {"prompt": "abc", "data_source": "sort_letters", "reward_model": {"ground_truth": None}}
    (folder / "no_truth.jsonl").write_text((json.dumps(without_truth) + "\n") * 4)
    (folder / "broken.jsonl").write_text("no row")
    (folder / "broken.py").write_text("def compute_score(: pass")
    return folder


@pytest.fixture
def config_file(files: Path, tmp_path: Path) -> Path:
    tree: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "runs" / "of" / "mine"), "total_steps": 2},
        "data": {"train_files": str(files / "train.jsonl"), "train_batch_size": 2, "max_prompt_length": 8},
        "actor": {"model": str(files / "model")},
        "tracking": {"trackers": []},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def refused(config_file: Path, files: Path, *arguments: str) -> int:
    return main(["--config", str(config_file), *(argument.replace("{}", str(files)) for argument in arguments)])


@pytest.mark.parametrize("only_checks", [False, True], ids=["start", "check"])
@pytest.mark.parametrize("case", [*KEYS.items(), *HERE.items(), *INPUTS.items()], ids=lambda case: case[0])
def test_a_refused_start_leaves_no_run_folder(
    config_file: Path,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: tuple[str, tuple[list[str], str]],
    only_checks: bool,
) -> None:
    what, (overrides, sentence) = case
    put_gpus(monkeypatch, [1 << 40])
    elsewhere = [
        "services.launch=external",
        *(f"services.{role}.address={free_address()}" for role in ("actor", "critic")),
    ]
    arguments = [*overrides, *(elsewhere if what in INPUTS else []), *(["--check"] if only_checks else [])]
    assert refused(config_file, files, *arguments) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert sentence in said[0]
    assert not (tmp_path / "runs").exists()


def test_groups_that_load_meanwhile_are_ended_and_their_logs_go_with_the_folder(
    config_file: Path, files: Path, tmp_path: Path
) -> None:
    assert refused(config_file, files, "data.train_files={}/broken.jsonl") == 2
    assert not (tmp_path / "runs").exists()


def test_a_refused_start_removes_no_folder_that_was_there(config_file: Path, files: Path, tmp_path: Path) -> None:
    kept = tmp_path / "runs" / "of" / "mine" / "notes.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    assert refused(config_file, files, "actor.model={}/none") == 2
    assert kept.read_text() == "mine"
    shutil.rmtree(kept.parent)
    other = tmp_path / "runs" / "of" / "another"
    other.mkdir()
    assert refused(config_file, files, "actor.model={}/none") == 2
    assert [*(tmp_path / "runs" / "of").iterdir()] == [other]


def test_a_controller_that_is_refused_a_held_folder_leaves_it_to_the_other(config_file: Path) -> None:
    config = load_config(config_file)
    with RunFolder(config) as folder:
        with pytest.raises(ConfigError, match="another controller is running"), RunFolder(config):
            pass
        assert folder.config_file.exists()


def test_a_folder_stays_in_which_groups_of_somebody_else_write(config_file: Path, files: Path, tmp_path: Path) -> None:
    config = load_config(config_file, ["services.launch=external", "services.actor.address=localhost:1"])
    with RunFolder(config) as folder:
        log = folder.path / "logs" / "actor_0.log"
        log.touch()
        folder.remove_if_new()
        assert log.exists()
        log.unlink()
        folder.remove_if_new()
    assert not (tmp_path / "runs").exists()
