"""Actor and critic whose engines only sleep and answer, behind the real runtime: what is left is what surrounds them.

    python -m services.runtime.group.torchrun --nproc-per-node 1 -m benchmarks.sleeping_engine ROLE --config FILE

The seconds of each command are in `<run.dir>/engine_s.json`, by method. Answers are noise of the right lengths: those
of responses are drawn from max_response_length / 16 up (varied), or all as long as that (fixed).
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from google.protobuf.message import Message

from services.runtime.command import Command, CommandProgress, Effect, Outcome, Rows
from services.runtime.context import RankContext
from services.runtime.launch import run_service
from services.runtime.role import Program
from splitppo.batch import Batch, Column
from splitppo.config.section import RoleName
from splitppo.v1 import actor_pb2, critic_pb2, reference_pb2, worker_pb2

SETTINGS = "engine_s.json"
VARIED = "varied lengths"
SHORTEST_SHARE = 16
_ROWS = ("prompts", "responses")
# What each command adds, beside Generate and the updates.
COMPUTED = {"ComputeLogProbs": "old_log_probs", "ComputeRefLogProbs": "ref_log_probs", "ComputeValues": "values"}


@lru_cache(maxsize=8)
def noise(name: str, num_values: int) -> np.ndarray:
    """Returns plausible values of a column, the same every time; log-probs of a token are nearly equal to each
    other.
    """
    random = np.random.default_rng(num_values)
    if name == "responses":
        return random.integers(4, 100, num_values, dtype=np.int32)
    values = random.standard_normal(num_values, dtype=np.float32)
    if name.endswith("log_probs"):
        own = np.random.default_rng(len(name)).standard_normal(num_values, dtype=np.float32)
        return np.asarray(-np.abs(values) - 1e-3 * np.abs(own), np.float32)
    return values


def response_lengths(num_rows: int, longest: int, *, is_varied: bool) -> np.ndarray:
    """Returns the number of tokens of each response."""
    if not is_varied:
        return np.full(num_rows, longest, np.int32)
    return np.random.default_rng(num_rows).integers(longest // SHORTEST_SHARE, longest + 1, num_rows, dtype=np.int32)


class SleepingRole:
    """A role without weights; see `services.runtime.role.Role`."""

    num_parameters = 1
    model = "none"

    def __init__(self, context: RankContext) -> None:
        self.role = worker_pb2.Role.Value(f"ROLE_{context.role_name.upper()}")
        self._is_actor = context.role_name == "actor"
        self._settings = context.config.run.dir / SETTINGS

    def commands(self) -> Sequence[Command]:
        """The commands that the steps of the benchmark need."""
        reference = self._forward("ComputeRefLogProbs", reference_pb2.ComputeRefLogProbsRequest)
        if self._is_actor:
            return (
                Command(
                    "Generate",
                    actor_pb2.GenerateRequest,
                    Effect.WRITES_SLOT,
                    self._generate,
                    Rows(columns=("prompts", "seeds")),
                ),
                self._forward("ComputeLogProbs", actor_pb2.ComputeLogProbsRequest),
                reference,
                self._trains(actor_pb2.ActorUpdateRequest, "advantages"),
            )
        return (
            self._forward("ComputeValues", critic_pb2.ComputeValuesRequest),
            reference,
            self._trains(critic_pb2.CriticUpdateRequest, "returns"),
        )

    def _forward(self, method: str, request_type: type[Message]) -> Command:
        return Command(method, request_type, Effect.WRITES_SLOT, self._compute, Rows(columns=_ROWS))

    def _trains(self, request_type: type[Message], column: str) -> Command:
        return Command("Update", request_type, Effect.TRAINS, self._update, Rows(columns=(column,)))

    def _seconds(self) -> dict[str, float]:
        return cast(dict[str, float], json.loads(self._settings.read_text()))

    def _sleep(self, method: str, started_s: float) -> None:
        time.sleep(max(0.0, started_s + self._seconds()[method] - time.monotonic()))

    def _generate(self, request: actor_pb2.GenerateRequest, batch: Batch, _: CommandProgress) -> Outcome:
        started_s = time.monotonic()
        num_samples = int(batch["seeds"].lengths[0])
        rows = np.repeat(np.arange(batch.num_rows), num_samples)
        is_varied = bool(self._seconds()[VARIED])
        lengths = response_lengths(len(rows), request.sampling.max_response_length, is_varied=is_varied)
        columns = {"prompts": batch["prompts"].take(rows)}
        for name in ("responses", "rollout_log_probs"):
            columns[name] = Column(noise(name, int(lengths.sum(dtype=np.int64))), lengths)
        self._sleep("Generate", started_s)
        return Outcome(Batch(len(rows), columns), policy_version=request.header.base_step)

    def _compute(self, request: Any, batch: Batch, _: CommandProgress) -> Outcome:
        started_s = time.monotonic()
        method = request.DESCRIPTOR.name.removesuffix("Request")
        lengths = batch["responses"].lengths
        column = Column(noise(COMPUTED[method], int(lengths.sum(dtype=np.int64))), lengths)
        self._sleep(method, started_s)
        return Outcome(Batch(batch.num_rows, {COMPUTED[method]: column}))

    def _update(self, request: Any, _batch: Batch, _: CommandProgress) -> Outcome:
        self._sleep(request.DESCRIPTOR.name.removesuffix("Request"), time.monotonic())
        return Outcome()

    def save_checkpoint(self, directory: Path, service_state: bytes, *, with_hf_model: bool) -> Future[str]:
        """Saves nothing."""
        raise NotImplementedError

    def check_checkpoint(self, directory: Path) -> None:
        """Checks nothing, since there is no checkpoint."""
        raise ValueError(f"{directory}: a sleeping engine has no checkpoints")

    def load_checkpoint(self, _directory: Path | None) -> bytes:
        """Returns to the initial model."""
        return b""

    def compute_weights_digest(self) -> str:
        """Returns the digest of no weights."""
        return hashlib.sha256(b"").hexdigest()


if __name__ == "__main__":
    run_service(Program(cast(RoleName, sys.argv.pop(1)), SleepingRole))
