"""Actor and critic whose engines only sleep and answer, behind the real runtime: what is left is what surrounds them.

    python -m services.runtime.group.torchrun --nproc-per-node 1 -m benchmarks.sleeping_engine ROLE --config FILE

The seconds of each command are in `<run.dir>/engine_s.json`, by method. Answers are noise of the right lengths: those
of responses are drawn from max_response_length / 16 up (varied), or all as long as that (fixed). With forced lengths
(`debug.response_lengths`) the seconds are those of one token, in Generate those of one decoding step, which costs the
same for one row as for `rollout.max_batch_size` rows; a row joins as soon as another one has ended.
"""

from __future__ import annotations

import hashlib
import heapq
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


def num_decoding_steps(num_tokens: Sequence[int], max_batch_size: int) -> int:
    """Returns the decoding steps that rows need, in this order, if each joins as soon as another one has ended."""
    ends = [0] * max_batch_size
    for length in num_tokens:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


class SleepingRole:
    """A role without weights; see `services.runtime.role.Role`."""

    num_parameters = 1
    model = "none"

    def __init__(self, context: RankContext) -> None:
        self.role = worker_pb2.Role.Value(f"ROLE_{context.role_name.upper()}")
        self._is_actor = context.role_name == "actor"
        self._settings = context.config.run.dir / SETTINGS
        self._max_batch_size = context.config.rollout.max_batch_size
        self._forced_lengths = context.config.debug.response_lengths

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
                    Rows(columns=("prompts", "seeds"), optional_columns=("begun_responses", "begun_log_probs")),
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

    def _sleep(self, method: str, started_s: float, num_units: int = 1) -> None:
        time.sleep(max(0.0, started_s + self._seconds()[method] * num_units - time.monotonic()))

    def _num_units(self, num_tokens: int) -> int:
        return 1 if self._forced_lengths is None else num_tokens

    def _generate(self, request: actor_pb2.GenerateRequest, batch: Batch, _: CommandProgress) -> Outcome:
        started_s = time.monotonic()
        if self._forced_lengths is not None:
            return self._go_on(request, batch, started_s)
        num_samples = int(batch["seeds"].lengths[0])
        rows = np.repeat(np.arange(batch.num_rows), num_samples)
        is_varied = bool(self._seconds()[VARIED])
        lengths = response_lengths(len(rows), request.sampling.max_response_length, is_varied=is_varied)
        columns = {"prompts": batch["prompts"].take(rows)}
        for name in ("responses", "rollout_log_probs"):
            columns[name] = Column(noise(name, int(lengths.sum(dtype=np.int64))), lengths)
        self._sleep("Generate", started_s)
        return Outcome(Batch(len(rows), columns), policy_version=request.header.base_step)

    def _go_on(self, request: actor_pb2.GenerateRequest, batch: Batch, started_s: float) -> Outcome:
        """Samples responses of forced lengths, at most `max_step_tokens` tokens of each, after those that it has."""
        assert self._forced_lengths is not None
        seeds = batch["seeds"]
        longest = request.sampling.max_response_length
        wanted = np.array([min(self._forced_lengths.of(seed), longest) for seed in seeds.values.tolist()], np.int32)
        begun = batch["begun_responses"].lengths if "begun_responses" in batch else np.zeros_like(wanted)
        lengths = np.minimum(wanted, begun + (request.max_step_tokens or longest)).astype(np.int32)
        columns = {
            "prompts": batch["prompts"].take(np.repeat(np.arange(batch.num_rows), seeds.lengths)),
            "seeds": Column(seeds.values, np.ones(len(wanted), np.int32)),
        }
        for name in ("responses", "rollout_log_probs"):
            columns[name] = Column(noise(name, int(lengths.sum(dtype=np.int64))), lengths)
        if request.max_step_tokens:
            columns["unfinished"] = Column((lengths < wanted).astype(np.uint8), np.ones(len(wanted), np.int32))
        num_steps = num_decoding_steps((lengths - begun).tolist(), self._max_batch_size)
        self._sleep("Generate", started_s, num_steps)
        return Outcome(Batch(len(wanted), columns), policy_version=request.header.base_step)

    def _compute(self, request: Any, batch: Batch, _: CommandProgress) -> Outcome:
        started_s = time.monotonic()
        method = request.DESCRIPTOR.name.removesuffix("Request")
        lengths = batch["responses"].lengths
        column = Column(noise(COMPUTED[method], int(lengths.sum(dtype=np.int64))), lengths)
        self._sleep(method, started_s, self._num_units(len(column.values)))
        return Outcome(Batch(batch.num_rows, {COMPUTED[method]: column}))

    def _update(self, request: Any, batch: Batch, _: CommandProgress) -> Outcome:
        started_s = time.monotonic()
        num_tokens = sum(len(column.values) for column in batch.columns.values())
        self._sleep(request.DESCRIPTOR.name.removesuffix("Request"), started_s, self._num_units(num_tokens))
        return Outcome()

    def save_checkpoint(self, directory: Path, service_state: bytes, *, with_hf_model: bool) -> Future[str]:
        """Saves nothing."""
        raise NotImplementedError

    def check_checkpoint(self, directory: Path) -> None:
        """Checks nothing, since there is no checkpoint."""
        raise ValueError(f"{directory}: a sleeping engine has no checkpoints")

    def load_checkpoint(self, _directory: Path | None, _progress: Any) -> bytes:
        """Returns to the initial model."""
        return b""

    def compute_weights_digest(self) -> str:
        """Returns the digest of no weights."""
        return hashlib.sha256(b"").hexdigest()


if __name__ == "__main__":
    run_service(Program(cast(RoleName, sys.argv.pop(1)), SleepingRole))
