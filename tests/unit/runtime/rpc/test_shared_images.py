"""Images of prompts travel once and are held once, however many responses and parts have them."""

from __future__ import annotations

import tempfile
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from services.runtime.rpc.servicer import WorkerServicer
from services.runtime.state.worker import Worker
from splitppo.batch import Batch, Column, RowStore, SharedColumn, held_bytes
from splitppo.rpc.codec import encode_messages, receive_batch
from splitppo.v1 import batch_pb2, worker_pb2
from tests.unit.runtime.rpc.workers import make_worker

NUM_PROMPTS = 512
NUM_SAMPLES = 8
IMAGE_BYTES = 360_000
NUM_PARTS = 6
MB = 1_000_000


def slot(part: int = 0) -> batch_pb2.Slot:
    return batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=1, part=part)


async def put(worker: Worker, batch: Batch, part: int) -> int:
    """Puts a batch as a controller does; returns the bytes that the worker received."""
    header, chunks = encode_messages(batch, slot(part))

    async def messages() -> AsyncIterator[bytes]:
        opening = worker_pb2.PutBatchHeader(run_id="run", epoch=1, batch=header)
        yield worker_pb2.PutBatchRequest(header=opening).SerializeToString()
        for chunk in chunks:
            yield chunk

    return (await WorkerServicer(worker).put_batch(messages(), None)).received_bytes


async def get(worker: Worker, columns: list[str]) -> Batch:
    request = worker_pb2.GetBatchRequest(run_id="run", epoch=1, slot=slot(), columns=columns)

    async def messages() -> AsyncIterator[bytes]:
        async for message in WorkerServicer(worker).get_batch(request, None):
            yield message if isinstance(message, bytes) else message.SerializeToString()

    _, batch = await receive_batch(messages(), 1 << 30, message_type=worker_pb2.GetBatchResponse)
    return batch


async def test_what_parts_have_in_common_comes_back_as_it_was_put(tmp_path: Path) -> None:
    worker = make_worker(tmp_path)
    images = [[1, 2, 3], [], [4, 5]]
    rows = Batch.from_rows(places=[[place] for place in range(6)], images=[images[place // 2] for place in range(6)])
    for part, places in enumerate(([0, 2, 5], [1, 3, 4]), start=1):
        assert await put(worker, rows.take(np.array(places)), part) == 3 * 4 + 5

    whole = await get(worker, ["images"])

    assert [row.tolist() for row in whole["images"].rows()] == [images[place // 2] for place in range(6)]
    assert whole["images"].store.num_rows == 3


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def mapped_prompts() -> Batch:
    """Prompts whose images are in a file that is mapped into memory, as the controller has them."""
    with tempfile.TemporaryFile() as file:
        for seed in range(NUM_PROMPTS):
            file.write(np.random.default_rng(seed).bytes(IMAGE_BYTES))
        file.flush()
        values = np.memmap(file, np.uint8, mode="r")
    lengths = np.full(NUM_PROMPTS, IMAGE_BYTES, np.int32)
    images = SharedColumn(RowStore((Column(values, lengths),)), np.arange(NUM_PROMPTS, dtype=np.int32))
    prompts = Column.from_rows([[7] * 1000] * NUM_PROMPTS, np.dtype(np.int32))
    return Batch(NUM_PROMPTS, {"prompts": prompts, "images": images})


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
async def test_the_images_of_a_step_are_in_the_slots_once_and_in_the_controller_not_at_all(tmp_path: Path) -> None:
    """512 prompts x 8 samples x 0.36 MB: 1.5 GB, if every response had its own."""
    worker = make_worker(tmp_path)
    prompts = mapped_prompts()
    before, _ = tracemalloc.get_traced_memory()

    rows = prompts.take(np.repeat(np.arange(NUM_PROMPTS), NUM_SAMPLES))
    places = Batch.from_rows(places=np.arange(rows.num_rows)[:, None])
    rows = rows.merge(places)
    in_controller = tracemalloc.get_traced_memory()[0] - before
    order = np.random.default_rng(0).permutation(rows.num_rows)
    for part in range(NUM_PARTS):
        await put(worker, rows.take(np.sort(order[part::NUM_PARTS])), part + 1)
    in_both, _ = tracemalloc.get_traced_memory()
    in_slots = in_both - before - in_controller

    images = NUM_PROMPTS * IMAGE_BYTES
    assert in_controller < 20 * MB  # the tokens of the prompts
    assert images < in_slots < images + 25 * MB
    assert in_controller + in_slots < 300 * MB
    assert held_bytes([worker.slots.get(slot(part + 1)) for part in range(NUM_PARTS)]) < images + 25 * MB
    whole = worker.slots.get(slot())["images"].rows()
    for row in (0, 17, 4095):
        assert whole[row].tobytes() == prompts["images"].rows()[row // NUM_SAMPLES].tobytes()
