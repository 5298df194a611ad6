"""The recipe read_digits, by its command: a whole run that must learn to see, and runs that have nothing to see."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from recipes.read_digits.prepare import RECIPE
from splitppo.images.headers import read_header
from tests.support.recipes import trained
from tests.support.runs import RunFolder

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

NUM_STEPS = 4
ANY = "evaluation.min_accuracy=0"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The recipe, which fails if too few digits are read at its end."""
    return trained("read_digits", tmp_path_factory.mktemp("whole") / "run")


def test_about_half_of_the_digits_are_read_at_the_start_and_nearly_all_at_the_end(run: RunFolder) -> None:
    rewards = [step["critic/score/mean"] for step in run.metrics[1:]]
    assert 0.35 < rewards[0] < 0.65
    assert sum(rewards[-10:]) > 9.0
    assert run.summary["validation"]["after"]["overall"] > 0.9


def test_every_recorded_response_has_its_image_beside_it(run: RunFolder) -> None:
    rows = pq.read_table(run.path / "rollouts/train/1.parquet").to_pylist()
    recorded = [row for row in rows if row["why"]]
    assert recorded
    for row in recorded:
        header = read_header((run.path / "rollouts/images" / row["images"]).read_bytes())
        assert (header.format, header.width, header.height) == ("PNG", 32, 32)
    of_prompts = {(row["prompt_index"], row["images"]) for row in recorded}
    assert len(of_prompts) == len({prompt for prompt, _ in of_prompts})


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_with_the_images_of_other_rows_nothing_can_be_learned(
    estimator: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = [f"data.{split}_files={RECIPE.output}/shuffled/{split}.parquet" for split in ("train", "val")]
    few = (f"run.total_steps={NUM_STEPS}", f"algorithm.adv_estimator={estimator}", ANY)
    run = trained("read_digits", tmp_path_factory.mktemp("shuffled") / "run", *files, *few)
    rewards = [step["critic/score/mean"] for step in run.metrics[1:]]
    assert 0.04 < sum(rewards) / NUM_STEPS < 0.17  # of 128 images a step
    assert run.summary["validation"]["after"]["overall"] < 0.2


def test_what_is_not_the_tower_learns_beside_a_frozen_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    frozen = ("actor.freeze_vision_tower=true", "critic.freeze_vision_tower=true")
    folder = tmp_path_factory.mktemp("frozen") / "run"
    run = trained("read_digits", folder, "run.total_steps=20", *frozen, ANY)
    rewards = [step["critic/score/mean"] for step in run.metrics[1:]]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.25
