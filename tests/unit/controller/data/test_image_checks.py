"""A run whose rows have images: what cannot read them is refused, and what they are like is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from controller.data.image_checks import wrong_image
from controller.preflight import load_inputs
from splitppo.config import Config, ConfigError
from splitppo.config.worker_digest import worker_digest
from tests.support.fake_services import make_config
from tests.support.model_folders import EXTERNAL, write_model
from tests.support.vision_folders import image_row, write_vision_folder
from tests.support.vision_models import VISION_VOCABULARY, draw_image

SOURCE = {"data_source": "sort_letters"}


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """A config whose model reads the images of its rows, which are in rows 2 and 3 of 4; changes replace its keys."""
    model = write_vision_folder(tmp_path / "actor")
    images = [
        {"bytes": draw_image(1, 28 * 2, 28), "path": None},
        {"bytes": draw_image(2, 28 * 4, 28 * 4), "path": None},
    ]
    rows = [image_row("a", None), image_row("<image>", images[:1]), image_row("<image>b<image>", images)]
    pq.write_table(pa.Table.from_pylist([row | SOURCE for row in (*rows, rows[0])]), tmp_path / "train.parquet")

    def config(**changes: Any) -> Config:
        files = {"data__train_files": str(tmp_path / "train.parquet"), "actor__model": model}
        return make_config(tmp_path / "run", **files | changes)

    return config


def with_environment(tmp_path: Path) -> dict[str, Any]:
    lines = ["class Game:", "    async def reset(self, row): ...", "    async def step(self, answer): ...", ""]
    (tmp_path / "game.py").write_text("\n".join(lines))
    return {"rollout__multi_turn__environments": {"default": {"path": str(tmp_path / "game.py"), "name": "Game"}}}


PARTIAL = {
    "rollout__max_step_tokens": 2,
    "algorithm__rollout_correction": {"rollout_is": "token"},
    "rollout__check_freq": 0,
}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (PARTIAL, "which excludes rollout.max_step_tokens: responses are sampled as a whole"),
        ({"critic__privileged_prompt": "{ground_truth}"}, "which excludes critic.privileged_prompt: "),
        ({"actor__ulysses_sequence_parallel_size": 2}, r"actor.ulysses_sequence_parallel_size \(2\): the positions of"),
        (
            {"critic__ulysses_sequence_parallel_size": 2},
            r"critic.ulysses_sequence_parallel_size \(2\): the positions of",
        ),
        (
            {"reward__scorers": {"default": [{"name": "judge"}]}},
            "which excludes the scorer 'judge' of data_source 'sort_letters': it would read the text alone",
        ),
    ],
)
def test_what_cannot_read_images_is_refused_with_the_first_row_that_has_some(
    make: Any, changes: dict[str, Any], sentence: str
) -> None:
    ranks = {"services__actor__num_processes": 2, "services__critic__num_processes": 2}
    with pytest.raises(ConfigError, match=rf"train\.parquet, row 2: column 'images' is not empty, .*{sentence}"):
        load_inputs(make(**changes, **(ranks if "ulysses" in sentence else {})))


def test_models_beside_the_trained_ones_are_refused_and_environments(tmp_path: Path, make: Any) -> None:
    other = write_model(tmp_path / "other", vocab_size=len(VISION_VOCABULARY), num_labels=1)
    for changes, sentence in (
        (
            {"teacher__model": write_vision_folder(tmp_path / "teacher") and other},
            "teacher.model: it would read the text",
        ),
        ({"reward_model__model": other}, "reward_model.model: it would read the text alone"),
        (with_environment(tmp_path), "rollout.multi_turn.environments: a prompt with images has one turn"),
    ):
        with pytest.raises(ConfigError, match=rf"row 2: column 'images' is not empty, which excludes {sentence}"):
            load_inputs(make(**changes))


def test_validation_rows_are_checked_too(tmp_path: Path, make: Any) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text((json.dumps(image_row("a", None) | SOURCE) + "\n") * 4)
    changes = {"data__train_files": str(text), "critic__privileged_prompt": "{ground_truth}"}
    load_inputs(make(**changes))
    with pytest.raises(
        ConfigError, match=r"train\.parquet, row 2: column 'images' is not empty, which excludes critic"
    ):
        load_inputs(make(**changes, data__val_files=str(tmp_path / "train.parquet")))


def test_a_critic_that_reads_no_images_or_counts_them_otherwise_is_refused(tmp_path: Path, make: Any) -> None:
    text = tmp_path / "text"
    write_vision_folder(text)
    config = json.loads((text / "config.json").read_text())
    (text / "config.json").write_text(json.dumps(config["text_config"]))
    with pytest.raises(
        ConfigError, match=r"row 2: critic\.model has no vision tower, but column 'images' is not empty"
    ):
        load_inputs(make(critic__model=str(text)))
    load_inputs(make(critic__model=str(text), algorithm__adv_estimator="grpo"))
    other = write_vision_folder(tmp_path / "other", "qwen3_vl")
    with pytest.raises(ConfigError, match=r"^critic and actor count images differently: patch_size 16 and 14$"):
        load_inputs(make(critic__model=other))
    other = write_vision_folder(tmp_path / "third", image_token_id=config["vision_start_token_id"])
    with pytest.raises(ConfigError, match=r"^critic and actor count images differently: image_token_id \d+ and \d+$"):
        load_inputs(make(critic__model=other))


def test_the_check_says_how_many_tokens_images_have(make: Any) -> None:
    inputs = load_inputs(make(data__val_files=make().data.train_files[0]))
    of_images = "images: 3 in 2 of 4 prompts, 0.0 MB; tokens of an image: 2 to 16, median 2, 90 % at most 16"
    of_split = f"{of_images}; tokens of a prompt: up to 28\n"
    assert inputs.image_report == f"training {of_split}validation {of_split}"
    assert load_inputs(make(data__max_prompt_length=6)).image_report == ""


def test_what_a_model_takes_of_images_is_in_the_digest_of_its_group(tmp_path: Path, make: Any) -> None:
    config = make()
    folder = Path(config.actor.model)
    digests = [worker_digest(config, role) for role in ("actor", "critic")]
    assert [worker_digest(make(data__max_pixels=28 * 28), role) for role in ("actor", "critic")] != digests
    # A controller without the models of its groups has their files in the folder of the tokenizer.
    elsewhere = make(**EXTERNAL, actor__model=str(tmp_path / "elsewhere"), data__tokenizer=str(folder))
    here = worker_digest(elsewhere, "actor")
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_pixels": 28 * 28 * 2}))
    assert [worker_digest(config, role) for role in ("actor", "critic")] != digests
    assert worker_digest(elsewhere, "actor") != here


def test_an_image_that_a_group_names_has_a_place_in_the_data_files(make: Any) -> None:
    rows = load_inputs(make()).rows
    name = rows[2].images.names[1]
    sentence = f"actor, rank 1, step 3, Generate: ValueError: image {name} is truncated; rank 0 says nothing"
    assert str(wrong_image(sentence, rows)).endswith("train.parquet, row 3: image 2 is truncated")
    assert wrong_image(f"image {'0' * 32} is truncated", rows) is None
    assert wrong_image("the actor was lost", rows) is None
