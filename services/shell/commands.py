"""The contract between the shell and a role: commands that the mailbox runs, and what a role must be able to do.

The shell moves rows and orders work; it knows nothing of PPO. A role (actor, critic) declares its commands; the
shell serves each as the RPC of the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from splitppo.batch import Batch
from splitppo.failpoints import point_of
from splitppo.rpc.errors import Place
from splitppo.v1 import worker_pb2


class Report(Protocol):
    """What the engine loop of a rank says while a command runs, and is told."""

    def __call__(self, done: int, total: int, phase: str) -> None:
        """Progress, at token and micro-batch boundaries, on every rank; rank 0's is streamed to the callers."""
        ...

    def part_ready(self, part: int, columns: Batch, *, policy_version: int) -> None:
        """What `Outcome.columns` will hold for this rank's rows of a part (from 1), as soon as it is complete.

        Only where the rows have the column `groups`, and then once for every part that this rank has rows of, in any
        order. Parts that a rank has no rows of need no word.
        """
        ...

    @property
    def is_cancelled(self) -> bool:
        """True once nobody needs the command any more: a cancellable command then raises CommandCancelled.

        Ranks learn it at different times, up to half a second apart, and some may have finished before: nobody may
        wait for another rank between the first question and the end of the command.
        """
        ...


class CommandCancelled(Exception):
    """A rank gave up a command because `Report.is_cancelled`; its state is as it was before, and the group goes on."""


@dataclass(frozen=True)
class Outcome:
    """What a command leaves behind; every rank returns one.

    Attributes:
        columns: new columns for this rank's rows, in the order received; the shell gathers them into the slot.
            A command that expands rows (Generate) returns a multiple of its rows, grouped by input row.
        metrics: already reduced over ranks; rank 0's are sent.
        weights_sha256: answer of ComputeWeightsDigest and LoadCheckpoint.
        policy_version: the committed step whose weights made the columns (Generate).
        durable: the reply waits for rank 0's, the mailbox does not (SaveCheckpoint); resolves when all ranks are done,
            rank 0's with the sha256 of the manifest.
    """

    columns: Batch | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    weights_sha256: str = ""
    policy_version: int = 0
    durable: Future[str] | None = None


def step_of(request: Any) -> int:
    """The step that a request works on: of its slot, or that it names (the one to load), or the committed one."""
    fields = request.DESCRIPTOR.fields_by_name
    if "slot" in fields and request.HasField("slot"):
        return int(request.slot.step)
    return int(request.step if "step" in fields else request.header.base_step)


@dataclass(frozen=True)
class Command:
    """One RPC of a role that goes through the mailbox.

    Attributes:
        method: name of the RPC, e.g. "Generate".
        request_type: its request message; has `header` and, where it works on rows, `slot`.
        columns: columns of the slot that it needs; without them the call is refused (FAILED_PRECONDITION).
        optional_columns: columns that are passed on where the slot has them.
        prepare: rank 0, before anything is broadcast: checks request and rows, may add columns or drop rows;
            ValueError (and any WireError) refuses. The column `groups` (one number per row, ascending, from 0 without
            gaps) makes the command a streamed one: part g + 1 is sent on while others are still worked on.
        shard: rows of each rank; (batch, num_ranks) -> num_ranks index arrays that hold every row once. Default:
            sharding.shard_by_tokens; for updates there is sharding.shard_by_mini_batch.
        run: every rank, with its rows (None for a command without a slot). A ValueError in here is a bug; what the
            caller can get wrong belongs into `prepare`.
        commits: an Update: requires step == committed + 1 and commits it.
        cancellable: it changes nothing but the slot, asks `Report.is_cancelled` and raises CommandCancelled.
        repairs: it brings the service to a known state, whatever was before (LoadCheckpoint); what waits or can be
            cancelled makes way for it.
    """

    method: str
    request_type: type[Message]
    run: Callable[[Any, Batch | None, Report], Outcome]
    columns: Sequence[str] = ()
    optional_columns: Sequence[str] = ()
    prepare: Callable[[Any, Batch], Batch] | None = None
    shard: Callable[[Batch, int], Sequence[NDArray[np.int64]]] | None = None
    commits: bool = False
    cancellable: bool = False
    repairs: bool = False

    @property
    def point(self) -> str:
        """Its name as a failpoint (splitppo/failpoints.py)."""
        return point_of(self.method)

    def place_of(self, request: Any) -> Place:
        """Where a rank says it is while it works on a request; the watchdog compares what the ranks say."""
        return Place(method=self.method, step=step_of(request))


class Role(Protocol):
    """A trained or served model behind the shell. Methods are called on the main thread of every rank, but for one."""

    role: worker_pb2.Role
    num_parameters: int
    model: str  # its architecture in words; a checkpoint of another one is refused

    def commands(self) -> Sequence[Command]:
        """The role's own RPCs."""
        ...

    def save_checkpoint(self, directory: Path, service_state: bytes, *, with_hf_model: bool) -> Future[str]:
        """Snapshots the role and writes it to `directory` in the background, with rank 0's `service_state`.

        Returns:
            resolves when the files of all ranks are written, on rank 0 with the sha256 of the weights in them (as
            `compute_weights_digest`); OSError where storage has failed.
        """
        ...

    def check_checkpoint(self, directory: Path) -> None:
        """Rank 0 alone, before all ranks load: refuses what is not a whole checkpoint of this role. Changes nothing.

        Raises:
            DamagedCheckpoint: it is missing or torn.
            ValueError: it is of another model.
        """
        ...

    def load_checkpoint(self, directory: Path | None) -> bytes:
        """Loads what was saved, or the initial model (None), and returns the service state (empty for None).

        Raises:
            ValueError, OSError: it is not a checkpoint of this role, or torn.
        """
        ...

    def compute_weights_digest(self) -> str:
        """sha256 over sorted named_parameters, values only, little-endian fp32; tied weights once."""
        ...
