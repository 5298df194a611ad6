"""Prompts with images: schedules, resumes, losses and other groups that sample end with the same weights."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.kill_matrix.rollout_cells import CORE
from tests.support.external import ExternalGroups, external_groups
from tests.support.image_runs import image_config
from tests.support.meetings import PAUSE_POINT, let_go, meetings
from tests.support.runs import EACH_STEP, NUM_STEPS, STALE, Inputs, RunFolder, started

pytestmark = pytest.mark.timeout(900)

STALE_OPTIONS = (*STALE, EACH_STEP)
# The rollout group takes turns with the critic's on its core, and answers half of the prompts.
SHARED = {
    "rollout": {"share": 0.5, "stream_groups": 4},
    "services": {"critic": {"cpus": [CORE]}, "rollout": {"cpus": [CORE], "threads": 1}},
}


@pytest.fixture(scope="module")
def with_images(inputs: Inputs) -> dict[str, Any]:
    return image_config(inputs)


@pytest.fixture(scope="module")
def image_groups(with_images: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExternalGroups]:
    """One actor rank and one critic rank."""
    folder = tmp_path_factory.mktemp("with_images")
    with external_groups({**with_images, "debug": meetings(NUM_STEPS)}, folder / "run") as groups:
        yield groups


@pytest.fixture(scope="module")
def serial(image_groups: ExternalGroups, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run on one rank of each group, without any overlap. Only to be read."""
    return image_groups.completed(tmp_path_factory.mktemp("serial") / "run", EACH_STEP, "run.schedule=serial")


def lose(on: ExternalGroups, role: str, *options: str) -> RunFolder:
    """Makes a run in which a group is lost in step 2."""
    on.empty(armed=[PAUSE_POINT])
    with on.started(*options) as controller:
        controller.wait_until(lambda folder: 1 in folder.committed_steps, "the checkpoint of step 1")
        for step in (2, 3):
            let_go(on.folder.path, step)
        on.restart(role)
        folder = controller.complete()
    assert "recovering in" in folder.log("controller_0")
    return folder


def test_schedules_a_resume_and_the_loss_of_either_group_end_with_the_same_weights(
    image_groups: ExternalGroups, serial: RunFolder, tmp_path: Path
) -> None:
    digests = [serial.summary["weights_sha256"]]
    assert None not in digests[0].values()
    digests.append(image_groups.completed(tmp_path / "gather", EACH_STEP).summary["weights_sha256"])
    digests.append(image_groups.resumed("run.schedule=overlap", "run.schedule=gather").summary["weights_sha256"])
    for role in ("actor", "critic"):
        digests.append(lose(image_groups, role, EACH_STEP, "run.schedule=overlap").summary["weights_sha256"])
    assert digests == digests[:1] * 5


def test_rollouts_of_older_weights_get_their_images_from_the_data_files(
    image_groups: ExternalGroups, tmp_path: Path
) -> None:
    whole = image_groups.completed(tmp_path / "serial", *STALE_OPTIONS, "run.schedule=serial")
    assert [line["training/staleness"] for line in whole.metrics[1:]] == [0.0, *[1.0] * (NUM_STEPS - 1)]
    digests = [whole.summary["weights_sha256"]]
    image_groups.empty()
    with image_groups.started(*STALE_OPTIONS, "run.stop_after_step=2") as controller:
        controller.complete()
    assert (controller.folder.checkpoint(2) / "rollouts.safetensors").exists()
    with image_groups.started(*STALE_OPTIONS, "run.schedule=overlap") as controller:
        digests.append(controller.complete().summary["weights_sha256"])
    assert "has no rollouts yet" not in controller.output
    digests.append(lose(image_groups, "actor", *STALE_OPTIONS).summary["weights_sha256"])
    assert digests == digests[:1] * 3


def test_a_rollout_group_samples_what_the_actor_would_sample_also_one_step_ahead(
    image_groups: ExternalGroups, serial: RunFolder, tmp_path: Path
) -> None:
    with image_groups.with_rollout_group():
        group = image_groups.completed(tmp_path / "group", EACH_STEP, "run.schedule=overlap")
        stale = [
            image_groups.completed(tmp_path / f"stale {schedule}", *STALE, f"run.schedule={schedule}")
            for schedule in ("serial", "overlap")
        ]
    assert group.summary["weights_sha256"] == serial.summary["weights_sha256"]
    assert stale[0].summary["weights_sha256"] == stale[1].summary["weights_sha256"]


def test_shares_of_two_groups_are_the_same_in_every_schedule(with_images: dict[str, Any], tmp_path: Path) -> None:
    config = {**with_images, **{section: {**with_images[section], **keys} for section, keys in SHARED.items()}}
    digests = []
    for schedule in ("serial", "overlap"):
        with started(config, tmp_path / schedule, f"run.schedule={schedule}") as controller:
            digests.append(controller.complete().summary["weights_sha256"])
    assert digests == digests[:1] * 2


@pytest.mark.extended
def test_two_ranks_end_with_the_same_weights_under_every_schedule(with_images: dict[str, Any], tmp_path: Path) -> None:
    config = {**with_images, "services": {**with_images["services"], "actor": {"num_processes": 2}}}
    digests = []
    for schedule in ("serial", "gather", "overlap"):
        with started(config, tmp_path / schedule, f"run.schedule={schedule}") as controller:
            digests.append(controller.complete().summary["weights_sha256"])
    assert digests == digests[:1] * 3


def torn(image: bytes) -> bytes:
    """Returns a PNG with the header of another one, and pixels that are none."""
    content = b"no pixels"
    start = image.index(b"IDAT") - 4
    checksum = zlib.crc32(b"IDAT" + content)
    data = struct.pack(">I", len(content)) + b"IDAT" + content + struct.pack(">I", checksum)
    return image[:start] + data + image[image.index(b"IEND") - 4 :]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_an_image_that_only_a_rank_finds_torn_ends_the_run_with_its_row(
    with_images: dict[str, Any], tmp_path: Path, num_ranks: int
) -> None:
    table = pq.read_table(with_images["data"]["train_files"])
    rows = table.to_pylist()
    rows[6]["images"][1]["bytes"] = torn(rows[6]["images"][1]["bytes"])
    pq.write_table(table.from_pylist(rows), tmp_path / "train.parquet")
    services = {**with_images["services"], "actor": {"num_processes": num_ranks}}
    override = f"data.train_files={tmp_path / 'train.parquet'}"
    with started({**with_images, "services": services}, tmp_path / "run", override, EACH_STEP) as controller:
        assert controller.wait() == 2, controller.output
        controller.wait_nothing_is_left()
    [sentence] = controller.errors
    assert sentence.startswith(f"error: {tmp_path / 'train.parquet'}, row 7: image 2 is truncated or damaged")
    assert "recovering in" not in controller.folder.log("controller_0")
    if num_ranks == 1:  # several ranks end as a group, with what they were saving
        last_step = controller.folder.metrics[-1]["step"]
        assert last_step > 0
        assert controller.folder.committed_steps[-1] == last_step
