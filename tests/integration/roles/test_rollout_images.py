"""A real rollout group of two ranks beside a real actor: both sample prompts with images, and hand the images on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from splitppo.batch import Batch, join_parts
from splitppo.v1 import batch_pb2
from tests.integration.runtime.client import Client, error_of, experience, result
from tests.support.groups import ONE_THREAD, Group
from tests.support.image_rows import make_image_batch
from tests.support.vision_models import save_vision_policy

pytestmark = pytest.mark.timeout(300)

IMAGES_OF_PROMPTS = ((0,), (), (1, 2), (3,), (), (2, 0, 2))
NUM_SAMPLES = 3
NUM_RANKS = {"actor": 1, "rollout": 2}
PARTS = (1, 2, 3)
MAX_RESPONSE = 12
IMAGES = ("images", "image_sizes")


def rows_of(model: Path) -> dict[str, Any]:
    batch = make_image_batch(model, IMAGES_OF_PROMPTS)
    seeds = np.arange(batch.num_rows * NUM_SAMPLES).reshape(batch.num_rows, NUM_SAMPLES)
    return {name: batch[name].rows() for name in ("prompts", *IMAGES)} | {"seeds": seeds}


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[dict[str, Client]]:
    """A client of each group; the rollout group has the actor's first weights."""
    tree: dict[str, Any] = {
        "run": {"dir": str(tmp_path), "total_steps": 10},
        "data": {"train_files": "unused", "train_batch_size": 2, "max_response_length": MAX_RESPONSE},
        "actor": {"model": str(save_vision_policy(tmp_path / "policy"))},
        "services": {},
    }
    with ExitStack() as stack:
        started = {}
        for role, num_ranks in NUM_RANKS.items():  # the actor knows no other group, so that it samples as well
            tree["services"][role] = {"num_processes": num_ranks}
            config_file = tmp_path / f"{role}.yaml"
            config_file.write_text(yaml.safe_dump(tree))
            options = {"num_processes": num_ranks, "overrides": ONE_THREAD}
            started[role] = Group(f"services.{role}", config_file, tmp_path, role, **options)
            stack.callback(started[role].stop)
        made: dict[str, Client] = {}
        for role, group in started.items():
            made[role] = Client(group.wait_ready().address, tmp_path / f"{role}.yaml", role=role)
            stack.callback(made[role].close)
            made[role].handshake()
        version = result(made["actor"].publish(0))
        result(made["rollout"].sync(0, version.manifest_sha256, base_step=-1))
        yield made


def files_of(batch: Batch) -> list[bytes]:
    return [files.tobytes() for files in batch["images"].rows()]


def test_both_groups_sample_the_same_and_responses_and_parts_have_their_images(
    clients: dict[str, Client], tmp_path: Path
) -> None:
    rows = rows_of(tmp_path / "policy")
    slot = experience(1)
    responses = []
    for client in clients.values():
        client.put(slot, **rows)
        events = [*client.generate(slot, base_step=0, num_parts=len(PARTS), max_response_length=MAX_RESPONSE)]
        assert [event.part.part for event in events if event.HasField("part")] == [*PARTS]
        whole = client.get(slot, "responses", "rollout_log_probs", *IMAGES)
        assert files_of(whole) == [files.tobytes() for files in rows["images"] for _ in range(NUM_SAMPLES)]
        slots = [batch_pb2.Slot(kind=slot.kind, step=slot.step, part=part) for part in PARTS]
        joined = join_parts([client.get(part, "responses", "places", *IMAGES) for part in slots])
        assert joined["responses"].values.tolist() == whole["responses"].values.tolist()
        assert files_of(joined) == files_of(whole)
        responses.append(whole)
    of_actor, of_group = responses
    assert of_actor["responses"].values.tolist() == of_group["responses"].values.tolist()
    log_probs = [sampled["rollout_log_probs"].values for sampled in responses]
    np.testing.assert_allclose(*log_probs, rtol=0, atol=1e-5)


def test_an_image_that_a_rank_cannot_decode_is_named(clients: dict[str, Client], tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "policy")
    damaged = rows["images"][0].copy()
    damaged[len(damaged) // 2 :] = 0
    rows["images"] = [damaged, *rows["images"][1:]]
    for client in clients.values():
        client.put(experience(1), **rows)
        refused = error_of(client.generate(experience(1), base_step=0, max_response_length=MAX_RESPONSE))
        assert re.search("image [0-9a-f]{32} is truncated", refused.message)
