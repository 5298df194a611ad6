"""Wrong input costs one sentence and exit status 2; no process and no new run folder stays, and no file is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import Inputs, RunFolder, started

Completed = Callable[[str, int], RunFolder]


SENTENCES = {
    "/nowhere/model": "actor.model=/nowhere/model",
    "reward.custom_function_path": "reward.custom_function_path=/nowhere/reward.py",
    "data.filters: none of the 16 rows of data.train_files passes data_source:": "data.filters.data_source=sums",
    "expected one of gae, grpo": "algorithm.adv_estimator=ppo",
}
MORE_SENTENCES = {
    "/nowhere/train.parquet": "data.train_files=/nowhere/train.parquet",
    "no reward for data_source 'letters'": "reward.custom_function_path=null",
    "key 'reward.custom_function_kwargs': ": "reward.custom_function_kwargs={style: terse}",
    "is no scorer (did you mean sort_letters?)": "reward.scorers={letters: [{name: sort_leters}]}",
    "actor.ppo_mini_batch_size": "data.train_batch_size=5",
    "data.train_batch_size": "data.train_batch_size=64",
    "run.resume": "run.resume=/nowhere/global_step_3",
    "services.actor.address": "services.launch=external",
    "rollout.stream_groups (33) must not exceed data.train_batch_size (8) times": "rollout.stream_groups=33",
}


@pytest.mark.parametrize(
    ("sentence", "override"),
    [*SENTENCES.items(), *(pytest.param(*each, marks=pytest.mark.extended) for each in MORE_SENTENCES.items())],
)
def test_a_mistake_costs_one_sentence(config: dict[str, Any], tmp_path: Path, sentence: str, override: str) -> None:
    with started(config, tmp_path / "run", override) as controller:
        assert controller.wait() == 2
        controller.wait_nothing_is_left()
    assert sentence in controller.output
    assert "Traceback" not in controller.output
    assert controller.output.strip().splitlines()[-1].startswith("error: ")
    assert not controller.folder.path.exists()


def test_a_folder_that_is_no_model_is_refused_by_name(config: dict[str, Any], tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (broken / file).write_bytes((Path(config["actor"]["model"]) / file).read_bytes())
    (broken / "config.json").write_text('{"model_type": "qwen2"')
    with started(config, tmp_path / "run", f"actor.model={broken}") as controller:
        assert controller.wait() == 2
    assert str(broken) in controller.output
    assert "Traceback" not in controller.output


def test_a_rank_that_cannot_load_its_model_is_heard_in_one_sentence(
    config: dict[str, Any], inputs: Inputs, tmp_path: Path
) -> None:
    without_weights = shutil.copytree(inputs.folder / "value", tmp_path / "value")
    (without_weights / "model.safetensors").unlink()
    with started(config, tmp_path / "run", f"critic.model={without_weights}") as controller:
        assert controller.wait() == 2
        controller.wait_nothing_is_left()
    assert f"error: critic.model: {without_weights} has no weights" in controller.output
    assert "Traceback" not in controller.output
    assert not controller.folder.path.exists()


def test_the_folder_of_another_config_is_refused_with_the_difference(
    completed: Completed, config: dict[str, Any], copied: Callable[[RunFolder], RunFolder]
) -> None:
    folder = copied(completed("gather", 1))
    before = (folder.path / "metrics.jsonl").read_bytes()
    with started(config, folder.path, "actor.weight_decay=0.5", "run.total_steps=9") as controller:
        assert controller.wait() == 2
    assert "actor.weight_decay: 0.01 in the folder, 0.5 now" in controller.output
    assert "total_steps" not in controller.output
    assert (folder.path / "metrics.jsonl").read_bytes() == before
