"""What is answered on the gRPC thread, without a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.shell.context import RankContext
from services.shell.ledger import Ledger
from services.shell.servicer import WorkerServicer
from services.shell.slots import SlotStore
from services.shell.worker import Worker
from splitppo.batch import Batch
from splitppo.config.load import validate
from splitppo.rpc.codec import encode
from splitppo.rpc.errors import StaleEpoch
from splitppo.v1 import batch_pb2, worker_pb2

SLOT = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=1)


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    tree = {
        "run": {"dir": str(tmp_path), "total_steps": 1},
        "data": {"train_files": "x", "train_batch_size": 1},
        "actor": {"model": "x"},
    }
    control: Any = None
    context = RankContext("actor", 0, 1, 0, torch.device("cpu"), control, validate(tree, "test"))
    worker = Worker(context, worker_pb2.ROLE_ACTOR, 1, (), Ledger(), SlotStore())
    worker.claim.take("run", 1)
    return worker


async def test_a_put_that_a_newer_controller_overtakes_changes_nothing(worker: Worker) -> None:
    header, chunks = encode(Batch.from_rows(prompts=[[1, 2], [3]]), SLOT)

    async def stream() -> AsyncIterator[bytes]:
        opening = worker_pb2.PutBatchHeader(run_id="run", epoch=1, batch=header)
        yield worker_pb2.PutBatchRequest(header=opening).SerializeToString()
        worker.claim.take("run", 2)
        for chunk in chunks:
            yield worker_pb2.PutBatchRequest(chunk=chunk).SerializeToString()

    with pytest.raises(StaleEpoch):
        await WorkerServicer(worker).put_batch(stream(), None)
    assert worker.slots.slots() == []


def test_a_checkpoint_saved_before_a_load_is_no_answer_afterwards(worker: Worker) -> None:
    worker.remember_save("save-5", worker_pb2.CommandResult(committed_step=5))
    assert worker.reply_of_save("save-5") is not None
    worker.mark_clean()
    assert worker.reply_of_save("save-5") is None
