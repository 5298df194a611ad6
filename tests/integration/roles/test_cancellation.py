"""A real generation is cancelled, on one rank and on two ranks with sharded weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from controller.workers.clients import ActorClient, Caller
from controller.workers.command import ProgressCallback
from splitppo.batch import Batch
from splitppo.config import Config, dump_config
from splitppo.config.load import validate
from splitppo.config.worker_digest import worker_digest
from splitppo.rpc.errors import NotFound, StaleEpoch, WireError
from splitppo.v1 import actor_pb2, batch_pb2, worker_pb2
from tests.support.groups import Group
from tests.support.models import VOCABULARY, save_policy
from tests.support.seeds import shifted

NONCE = "nonce"
NUM_PROMPTS = 4
# Thousands of responses, two at a time: longer than any test may take.
NUM_ENDLESS, MAX_RESPONSE = 2000, 480
SAMPLING = actor_pb2.SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_response_length=MAX_RESPONSE)

pytestmark = pytest.mark.timeout(300)


@dataclass
class Actor:
    """A running actor, and how to reach it."""

    group: Group
    config: Config

    def client(self, epoch: int, on_progress: ProgressCallback = lambda *_: None) -> ActorClient:
        caller = Caller("test", epoch, worker_digest(self.config, "actor"), NONCE)
        return ActorClient(self.group.address, caller, on_progress=on_progress)


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.extended), 2], ids=["1-rank", "2-ranks"])
def actor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Actor]:
    model = save_policy(tmp_path / "policy")
    config = validate(
        {
            "run": {"dir": str(tmp_path), "total_steps": 10},
            "data": {"train_files": "unused", "train_batch_size": NUM_PROMPTS, "max_response_length": MAX_RESPONSE},
            "rollout": {"max_batch_size": 2},
            "actor": {"model": str(model)},
            "services": {"actor": {"num_processes": request.param}},
        },
        "test",
    )
    config_file = tmp_path / "config.yaml"
    config_file.write_text(dump_config(config))
    (tmp_path / NONCE).touch()
    group = Group("services.actor", config_file, tmp_path, "actor", num_processes=request.param)
    try:
        group.wait_ready()
        yield Actor(group, config)
    finally:
        group.stop()


def slot(step: int, part: int = 0) -> batch_pb2.Slot:
    return batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=step, part=part)


def prompts(num_samples: int) -> Batch:
    rng = np.random.default_rng(shifted(0))
    rows = [rng.integers(3, len(VOCABULARY), rng.integers(2, 12)) for _ in range(NUM_PROMPTS)]
    return Batch.from_rows(prompts=rows, seeds=np.arange(NUM_PROMPTS * num_samples).reshape(NUM_PROMPTS, num_samples))


async def responses(client: ActorClient, step: int) -> list[int]:
    await client.put_batch(slot(step), prompts(1))
    await client.generate(slot(step), SAMPLING, base_step=0)
    tokens: list[int] = (await client.get_batch(slot(step), ["responses"]))["responses"].values.tolist()
    return tokens


async def test_a_newer_controller_ends_a_generation_and_finds_the_actor_as_it_was(actor: Actor) -> None:
    is_generating = asyncio.Event()

    def on_progress(role: str, method: str, progress: worker_pb2.Progress) -> None:
        is_generating.set()

    older, newer = actor.client(1), actor.client(2)
    await older.handshake(30)
    before = await responses(older, 2)
    digest = await older.compute_weights_digest()
    endless = actor.client(1, on_progress)
    await older.put_batch(slot(1), prompts(NUM_ENDLESS))
    generation = asyncio.create_task(endless.generate(slot(1), SAMPLING, base_step=0, num_parts=2))
    await is_generating.wait()

    await newer.handshake(30)

    with pytest.raises(StaleEpoch):  # what the older one hears when it asks again
        await generation
    log = (actor.config.run.dir / "logs" / "actor_0.log").read_text()
    assert "the command was cancelled: a newer controller has taken over" in log
    with pytest.raises(NotFound):
        await newer.get_batch(slot(1, part=1), ["responses"])
    assert await newer.compute_weights_digest() == digest
    await newer.load_checkpoint(0)
    assert await responses(newer, 1) == before
    for client in (older, newer, endless):
        await client.close()


@pytest.mark.extended
async def test_a_checkpoint_is_loaded_without_waiting_for_a_generation(actor: Actor) -> None:
    is_generating = asyncio.Event()
    client = actor.client(1)
    endless = actor.client(1, lambda *_: is_generating.set())
    await client.handshake(30)
    before = await responses(client, 2)
    await client.put_batch(slot(1), prompts(NUM_ENDLESS))
    generation = asyncio.create_task(endless.generate(slot(1), SAMPLING, base_step=0))
    await is_generating.wait()

    await client.load_checkpoint(0)

    with pytest.raises(WireError):  # cancelled; and asked again, its rows are gone
        await generation
    assert "the command was cancelled: other weights are being loaded" in (
        (actor.config.run.dir / "logs" / "actor_0.log").read_text()
    )
    assert await responses(client, 1) == before
    await client.close()
    await endless.close()
