"""verl's configuration in YAML: interpolations, verl's defaults, and mistakes in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from controller.commands.from_verl.command import read_settings
from controller.commands.from_verl.translation import Translation, translate
from splitppo.config import ConfigError
from tests.support.verl_launch import NOW

HYDRA = """
defaults: [ppo_trainer, _self_]
data: {train_files: t.parquet, val_files: "${data.train_files}", train_batch_size: 512, max_response_length: 700}
actor_rollout_ref:
  model: {path: my/model}
  actor: {ppo_epochs: 2, optim: {lr: 2e-6}, ppo_mini_batch_size: "${oc.select:data.train_batch_size,1}"}
  rollout: {name: vllm, n: 4, response_length: "${oc.select:data.max_response_length,512}"}
critic: {ppo_epochs: "${actor_rollout_ref.actor.ppo_epochs}", optim: {lr: 1.0e-05}}
trainer:
  total_training_steps: 9
  project_name: p
  default_local_dir: "out/${trainer.project_name}/${trainer.experiment_name}"
"""


def yaml_settings(tmp_path: Path, text: str, *overrides: str) -> Translation:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return translate(read_settings(file, overrides, {}, NOW), gpus=None, drop=())


def test_interpolations_are_resolved_with_verls_defaults_behind_them(tmp_path: Path) -> None:
    translation = yaml_settings(tmp_path, HYDRA, "trainer.experiment_name=e")
    assert translation.values["data.val_files"] == "t.parquet"
    assert translation.values["actor.ppo_mini_batch_size"] == 512
    assert translation.values["critic.ppo_epochs"] == 2
    assert translation.values["run.dir"] == "out/p/e"


def test_the_configuration_that_hydra_prints_resolved_is_read_as_the_one_with_interpolations(tmp_path: Path) -> None:
    tree = OmegaConf.create(HYDRA)
    del tree["defaults"]
    tree = OmegaConf.merge({"trainer": {"experiment_name": "e"}}, tree)
    OmegaConf.resolve(tree)
    resolved = OmegaConf.to_yaml(tree)
    assert "${" not in resolved
    expected = yaml_settings(tmp_path, HYDRA, "trainer.experiment_name=e")
    assert yaml_settings(tmp_path, resolved).values == expected.values


def test_what_a_yaml_leaves_to_be_given_is_not_given(tmp_path: Path) -> None:
    translation = yaml_settings(tmp_path, "data: {train_batch_size: 256}\nactor_rollout_ref: {rollout: {name: '???'}}")
    assert translation.stopping == []
    assert translation.values["rollout.backend"] == "vllm"


def test_what_a_yaml_leaves_at_verls_default_is_not_listed(tmp_path: Path) -> None:
    given = {finding.key for finding in yaml_settings(tmp_path, HYDRA).findings if finding.outcome != "default"}
    assert "critic.optim.lr" not in given
    assert "actor_rollout_ref.actor.optim.lr" in given


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("data: {train_files: '${no.such}'}", "data.train_files is ${no.such}, which cannot be resolved"),
        ("data: {train_batch_size: '${env:X}'}", "data.train_batch_size is ${env:X}, which cannot be resolved"),
        ("data: [1", "config.yaml is not valid YAML"),
        ("- 1", "expected a mapping of verl's sections"),
        ("defaults: [my_base]\ndata: {shuffle: false}", "its defaults list names 'my_base'"),
        ("trainer: {n_gpus_per_node: many}", "trainer.n_gpus_per_node: expected a number, got 'many'"),
    ],
)
def test_a_yaml_that_cannot_be_used_is_one_sentence(tmp_path: Path, text: str, fact: str) -> None:
    with pytest.raises(ConfigError) as caught:
        yaml_settings(tmp_path, text)
    assert fact in str(caught.value)
