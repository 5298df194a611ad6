"""A worker without a group, from which the gRPC thread answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from services.runtime.context import RankContext
from services.runtime.state.batch_store import BatchStore
from services.runtime.state.ledger import Ledger
from services.runtime.state.worker import Worker
from splitppo.config.load import validate
from splitppo.v1 import worker_pb2


def make_worker(run_dir: Path, **services: Any) -> Worker:
    """An actor of one rank at step 0, which epoch 1 of the run "run" has taken."""
    tree = {
        "run": {"dir": str(run_dir), "total_steps": 1},
        "data": {"train_files": "x", "train_batch_size": 1},
        "actor": {"model": "x"},
        "services": services,
    }
    control: Any = None
    context = RankContext("actor", 0, 1, torch.device("cpu"), control, validate(tree, "test"))
    worker = Worker(context, worker_pb2.ROLE_ACTOR, 1, (), Ledger(), BatchStore(context.config.services.max_held_bytes))
    worker.fencing.take("run", 1)
    return worker
