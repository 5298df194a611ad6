"""The controller's side of the wire: one client per group, one method per RPC, under the RPC's name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import grpc
import grpc.aio

from controller.trace import Span
from splitppo import __version__, failpoints
from splitppo.batch import Batch
from splitppo.rpc.calls import Patience, follow_command, repeat_until_answered, unreachable
from splitppo.rpc.codec import encode_parts, receive_batch
from splitppo.rpc.errors import (
    Internal,
    Place,
    Unauthenticated,
    Unavailable,
    WrongPolicy,
    WrongState,
    WrongStep,
    error_from_rpc,
)
from splitppo.rpc.identity import PROTOCOL_VERSION, request_id
from splitppo.rpc.security import PLAINTEXT, Credentials, connection_hint, handshake_failure
from splitppo.v1 import actor_pb2, actor_pb2_grpc, batch_pb2, critic_pb2, critic_pb2_grpc, worker_pb2, worker_pb2_grpc

T = TypeVar("T")
ProgressCallback = Callable[[str, str, worker_pb2.Progress], None]
PartCallback = Callable[[worker_pb2.PartReady], None]

# One attempt to reach a worker while it starts; a black-holed address must not eat the whole deadline.
_GREETING_TIMEOUT_S = 5.0
_GREETING_PAUSE_S = 0.1
_UNARY_TIMEOUT_S = 10.0
# States of a worker that takes no more commands, and ends soon; one that its launcher starts in its place does.
_LEAVING = {
    worker_pb2.WORKER_STATE_DRAINING: "it is draining",
    worker_pb2.WORKER_STATE_FAILED: "it has failed and ends",
}
_MAX_LOAD_ATTEMPTS = 5
_WORKER_SERVICE = "/splitppo.v1.WorkerService"

# The commands after which the worker is at another step.
_MOVES_THE_STEP = ("Update", "LoadCheckpoint")


@dataclass(frozen=True)
class Caller:
    """What a client introduces itself with.

    Attributes:
        run_id: the run.
        epoch: the controller's fencing token.
        config_digest: of the sections that shape the worker (splitppo/config/digest.py).
        nonce: name of a file in the run folder that the worker must see.
        connection: counts the connections of this controller; what is replayed over a new one are other commands.
    """

    run_id: str
    epoch: int
    config_digest: str = ""
    nonce: str = ""
    connection: int = 0


@dataclass(frozen=True)
class Limits:
    """Bounds of a client's calls.

    Attributes:
        progress_timeout_s: longest silence of a running command, and longest duration of any other call.
        reconnect_timeout_s: how long an unreachable worker is called again under the same request id.
        max_batch_bytes: largest batch taken from a worker.
        grace_s: how much longer a silent command is waited for: the worker's own watchdog can name the rank that hangs.
    """

    progress_timeout_s: float = 600.0
    reconnect_timeout_s: float = 5.0
    max_batch_bytes: int = 4 << 30
    grace_s: float = 0.0


@dataclass(frozen=True)
class CommandReply:
    """The result of one command.

    Attributes:
        metrics: as the worker named them.
        started_s, finished_s: when the engine worked, between request and reply; controller's clock, unix seconds.
        committed_step: committed after the command.
        replayed: the reply came from the ledger, the command had been applied before.
        weights_sha256: answer of ComputeWeightsDigest and LoadCheckpoint, else empty.
        policy_version: the step whose weights made the responses (Generate).
        manifest_sha256: of the manifest of what was saved (SaveCheckpoint).
    """

    metrics: Mapping[str, float]
    started_s: float
    finished_s: float
    committed_step: int
    replayed: bool
    weights_sha256: str
    policy_version: int = 0
    manifest_sha256: str = ""

    @property
    def timings_s(self) -> Mapping[str, float]:
        """Seconds that the worker names in its metrics, timing_s/<name>, by name."""
        prefix = "timing_s/"
        return {name.removeprefix(prefix): s for name, s in self.metrics.items() if name.startswith(prefix)}

    def span(self, pool: str, name: str, step: int) -> Span:
        """The engine's work on it, for the timeline."""
        return Span(pool, name, step, self.started_s, self.finished_s)


@dataclass(frozen=True)
class Traffic:
    """What a client has moved so far: bytes of batch columns, and seconds in which PutBatch and GetBatch ran."""

    bytes_sent: int = 0
    bytes_received: int = 0
    transfer_s: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.bytes_sent + other.bytes_sent,
            self.bytes_received + other.bytes_received,
            self.transfer_s + other.transfer_s,
        )

    def __sub__(self, other: Traffic) -> Traffic:
        return self + Traffic(-other.bytes_sent, -other.bytes_received, -other.transfer_s)


class WorkerClient:
    """A worker service of any role.

    Every method raises WireError (splitppo/rpc/errors.py) with role, step and method in its message. Calls that find
    the worker unreachable are repeated for `limits.reconnect_timeout_s`; a command is repeated under its request id,
    so it joins the running one or gets the stored reply. Not for use by several event loops.
    """

    role: ClassVar[str]

    def __init__(
        self,
        address: str,
        caller: Caller,
        limits: Limits = Limits(),
        on_progress: ProgressCallback | None = None,
        credentials: Credentials = PLAINTEXT,
    ) -> None:
        self.address = address
        self.worker = worker_pb2.HandshakeResponse()
        self.committed_step = 0
        self.traffic = Traffic()
        self._caller = caller
        self._limits = limits
        self._on_progress = on_progress
        self._status = worker_pb2.GetStatusResponse()
        self._clock_offset_s = 0.0  # worker minus controller
        self._num_loads = 0
        self._channel = credentials.channel(address)
        self._worker = worker_pb2_grpc.WorkerServiceStub(self._channel)  # type: ignore[no-untyped-call]
        # The batch streams, with messages that the codec serialises and parses.
        self._put_parts = self._channel.stream_unary(
            f"{_WORKER_SERVICE}/PutBatch", None, worker_pb2.PutBatchResponse.FromString
        )
        self._get_parts = self._channel.unary_stream(
            f"{_WORKER_SERVICE}/GetBatch", worker_pb2.GetBatchRequest.SerializeToString, None
        )

    async def close(self) -> None:
        """Closes the channel; running commands go on in the worker."""
        await self._channel.close(None)

    # Who is there.

    async def handshake(self, timeout_s: float) -> worker_pb2.HandshakeResponse:
        """Claims the worker for this controller, as soon as it can be reached.

        Raises:
            Unavailable: the worker could not be reached in time; the message names the address.
            WireError: the worker refuses this controller, or is not the one that was meant.
        """
        await self._wait_until_reached(timeout_s)
        worker = await self._repeat("Handshake", None, self._greet)
        self._check_worker(worker)
        self.worker, self.committed_step = worker, worker.committed_step
        self._status = await self.get_status()
        return worker

    async def _greet(self) -> worker_pb2.HandshakeResponse:
        request = worker_pb2.HandshakeRequest(
            protocol_version=PROTOCOL_VERSION,
            software_version=__version__,
            run_id=self._caller.run_id,
            epoch=self._caller.epoch,
            config_digest=self._caller.config_digest,
            nonce=self._caller.nonce,
        )
        sent_s = time.time()
        worker: worker_pb2.HandshakeResponse = await self._worker.Handshake(request, timeout=_UNARY_TIMEOUT_S)
        # The worker read its clock half-way between request and answer, as far as the controller can know.
        self._clock_offset_s = worker.unix_ns / 1e9 - (sent_s + time.time()) / 2
        return worker

    async def _wait_until_reached(self, timeout_s: float) -> None:
        """Returns when the worker answers and stays; one that is about to end is not reached yet."""
        deadline = time.monotonic() + timeout_s
        while True:
            remaining_s = deadline - time.monotonic()
            try:
                status = await self._worker.GetStatus(
                    worker_pb2.GetStatusRequest(), timeout=max(0.1, min(_GREETING_TIMEOUT_S, remaining_s))
                )
            except grpc.RpcError as failed:
                error = error_from_rpc(failed)
                if failed.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise error.at(Place(role=self.role, method="Handshake")) from failed
                if because := handshake_failure(error.message):
                    raise Unauthenticated(f"the {self.role} at {self.address} is not trusted: {because}") from failed
                reason = f"{error.message}{connection_hint(error.message)}"
            else:
                if status.state not in _LEAVING:
                    return
                reason = _LEAVING[status.state]
            if remaining_s <= _GREETING_PAUSE_S:
                raise Unavailable(
                    f"the {self.role} at {self.address} cannot be reached within {timeout_s:g} s: {reason}"
                )
            await asyncio.sleep(_GREETING_PAUSE_S)

    def _check_worker(self, worker: worker_pb2.HandshakeResponse) -> None:
        role = worker_pb2.Role.Name(worker.role).removeprefix("ROLE_").lower()
        if role != self.role:
            raise WrongState(f"the worker at {self.address} is a {role}, expected the {self.role}")
        if worker.protocol_version != PROTOCOL_VERSION:
            raise WrongState(
                f"the {role} at {self.address} speaks protocol {worker.protocol_version} (version"
                f" {worker.software_version}), the controller {PROTOCOL_VERSION} (version {__version__})"
            )
        if worker.config_digest != self._caller.config_digest:
            raise WrongState(
                f"the {role} at {self.address} was started with another configuration: its digest is"
                f" {worker.config_digest[:12]}, the controller's {self._caller.config_digest[:12]}"
            )

    async def get_status(self) -> worker_pb2.GetStatusResponse:
        """What the worker is doing; answered at once, also while the engine is busy."""
        request = worker_pb2.GetStatusRequest()
        return await self._repeat("GetStatus", None, lambda: self._worker.GetStatus(request, timeout=_UNARY_TIMEOUT_S))

    async def is_dirty(self) -> bool:
        """Whether an update has failed half-way: only a checkpoint brings the worker back."""
        status = await self.get_status()
        return bool(status.state == worker_pb2.WORKER_STATE_DIRTY)

    async def is_clean_at(self, step: int) -> bool:
        """Whether the worker is as it was when it had committed `step`, and takes commands."""
        status = await self.get_status()
        takes_commands = status.state in (worker_pb2.WORKER_STATE_IDLE, worker_pb2.WORKER_STATE_BUSY)
        return bool(takes_commands and status.committed_step == step)

    def is_fresh_at(self, step: int) -> bool:
        """True when the worker is as loading `step` would leave it: at its initial model, idle, without any rows."""
        status = self._status
        untouched = status.state == worker_pb2.WORKER_STATE_IDLE and status.committed_step == 0 and not status.slots
        return step == 0 and self._num_loads == 0 and untouched

    # Data.

    async def put_batch(self, slot: batch_pb2.Slot, batch: Batch) -> None:
        """Creates the slot, or adds columns to it (same number of rows)."""
        await self._repeat("PutBatch", slot.step, lambda: self._put(slot, batch))

    async def _put(self, slot: batch_pb2.Slot, batch: Batch) -> None:
        header, chunks = encode_parts(batch, slot)
        opening = worker_pb2.PutBatchHeader(run_id=self._caller.run_id, epoch=self._caller.epoch, batch=header)

        async def parts() -> AsyncIterator[bytes]:
            yield worker_pb2.PutBatchRequest(header=opening).SerializeToString()
            for chunk in chunks:
                yield chunk

        started_s = time.perf_counter()
        response = await self._put_parts(parts(), timeout=self._limits.progress_timeout_s)
        if response.received_bytes != batch.num_bytes:
            raise Internal(f"the worker took {response.received_bytes} of {batch.num_bytes} bytes")
        self.traffic += Traffic(bytes_sent=batch.num_bytes, transfer_s=time.perf_counter() - started_s)

    async def get_batch(self, slot: batch_pb2.Slot, columns: Sequence[str]) -> Batch:
        """The named columns of a slot."""
        return await self._repeat("GetBatch", slot.step, lambda: self._get(slot, columns))

    async def _get(self, slot: batch_pb2.Slot, columns: Sequence[str]) -> Batch:
        request = worker_pb2.GetBatchRequest(
            run_id=self._caller.run_id, epoch=self._caller.epoch, slot=slot, columns=columns
        )
        started_s = time.perf_counter()
        call = self._get_parts(request, timeout=self._limits.progress_timeout_s)
        header, batch = await receive_batch(call, self._limits.max_batch_bytes, part_type=worker_pb2.GetBatchResponse)
        if header.slot != slot or set(batch.columns) != set(columns):
            raise Internal(f"the worker sent {', '.join(batch.columns)}, asked for {', '.join(columns)}")
        self.traffic += Traffic(bytes_received=batch.num_bytes, transfer_s=time.perf_counter() - started_s)
        return batch

    # Commands of every role.

    async def save_checkpoint(self, *, base_step: int, with_hf_model: bool = False) -> CommandReply:
        """Writes this role's part of the checkpoint of `base_step`; answers when it is durable."""
        request = worker_pb2.SaveCheckpointRequest(
            header=self._header("SaveCheckpoint", base_step, base_step), with_hf_model=with_hf_model
        )
        return await self._command("SaveCheckpoint", base_step, self._worker.SaveCheckpoint, request)

    async def load_checkpoint(self, step: int) -> CommandReply:
        """Loads this role's part of the checkpoint of `step` (0: the initial model), whatever is committed now."""
        for attempt in range(1, _MAX_LOAD_ATTEMPTS + 1):
            status = await self.get_status()
            self._num_loads += 1
            header = self._header("LoadCheckpoint", step, status.committed_step)
            request = worker_pb2.LoadCheckpointRequest(header=header, step=step)
            try:
                return await self._command("LoadCheckpoint", step, self._worker.LoadCheckpoint, request)
            except WrongStep:
                # An update that was still under way has committed in between.
                if attempt == _MAX_LOAD_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    async def compute_weights_digest(self, base_step: int | None = None) -> str:
        """sha256 over the weights; `base_step` is the committed step by default."""
        base_step = self.committed_step if base_step is None else base_step
        request = worker_pb2.ComputeWeightsDigestRequest(
            header=self._header("ComputeWeightsDigest", base_step, base_step)
        )
        reply = await self._command("ComputeWeightsDigest", base_step, self._worker.ComputeWeightsDigest, request)
        return reply.weights_sha256

    # How calls are made.

    def _header(self, method: str, step: int, base_step: int, *parts: str | int) -> worker_pb2.CommandHeader:
        # After a checkpoint was loaded, the steps that follow are other commands than those before.
        attempt = (self._caller.connection, self._num_loads)
        name = request_id(self._caller.run_id, self._caller.epoch, step, method, *attempt, *parts)
        return worker_pb2.CommandHeader(
            run_id=self._caller.run_id, epoch=self._caller.epoch, base_step=base_step, request_id=name
        )

    def _slot_header(
        self, method: str, slot: batch_pb2.Slot, base_step: int, *parts: str | int
    ) -> worker_pb2.CommandHeader:
        return self._header(method, slot.step, base_step, slot.kind, slot.part, *parts)

    async def _command(
        self, method: str, step: int, rpc: Any, request: Any, on_part: PartCallback = lambda _: None
    ) -> CommandReply:
        """Sends a command and follows it to its result."""
        patience = Patience(self._limits.reconnect_timeout_s)
        place = Place(role=self.role, step=step, method=method)

        point = f"{self.role}.{failpoints.point_of(method)}"

        last = worker_pb2.Progress()

        def on_progress(progress: worker_pb2.Progress) -> None:
            patience.renew()
            last.CopyFrom(progress)
            failpoints.hit(point, step)
            if self._on_progress is not None:
                self._on_progress(self.role, method, progress)

        def on_ready(part: worker_pb2.PartReady) -> None:
            patience.renew()
            on_part(part)

        async def attempt() -> worker_pb2.CommandResult:
            return await follow_command(
                rpc(request),
                method,
                on_progress=on_progress,
                on_part=on_ready,
                silence_s=self._limits.progress_timeout_s + self._limits.grace_s,
                get_status=self.get_status,
            )

        failpoints.hit(f"{point}.begin", step)
        sent_s = time.time()
        try:
            result = await repeat_until_answered(attempt, patience, place)
        except Unavailable as error:
            raise unreachable(error, last)  # noqa: B904 - the same error
        failpoints.hit(f"{point}.replied", step)
        if method in _MOVES_THE_STEP:  # a checkpoint may be durable when later steps are done
            self.committed_step = result.committed_step
        started_s, finished_s = self._engine_time(result.engine_time, sent_s, time.time())
        return CommandReply(
            metrics=dict(result.metrics),
            started_s=started_s,
            finished_s=finished_s,
            committed_step=result.committed_step,
            replayed=result.replayed,
            weights_sha256=result.weights_sha256,
            policy_version=result.policy_version,
            manifest_sha256=result.manifest_sha256,
        )

    def _engine_time(self, engine: worker_pb2.EngineTime, sent_s: float, answered_s: float) -> tuple[float, float]:
        """When the engine worked, on the controller's clock.

        The clocks' offset is known to half a round trip only, but the work lies between request and reply: calls made
        one after the other never seem to overlap.
        """
        started_s = engine.started_unix_ns / 1e9 - self._clock_offset_s
        finished_s = engine.finished_unix_ns / 1e9 - self._clock_offset_s
        shift_s = max(sent_s - started_s, 0.0) or min(answered_s - finished_s, 0.0)
        return max(started_s + shift_s, sent_s), min(finished_s + shift_s, answered_s)

    async def _repeat(self, method: str, step: int | None, attempt: Callable[[], Awaitable[T]]) -> T:
        place = Place(role=self.role, step=step, method=method)
        return await repeat_until_answered(attempt, Patience(self._limits.reconnect_timeout_s), place)


class ActorClient(WorkerClient):
    """The actor: policy, rollouts and reference."""

    role = "actor"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._actor = actor_pb2_grpc.ActorServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def generate(
        self,
        slot: batch_pb2.Slot,
        sampling: actor_pb2.SamplingParams,
        *,
        base_step: int,
        num_parts: int = 1,
        on_part: Callable[[int], None] = lambda _: None,
    ) -> CommandReply:
        """Samples responses for the slot's prompts; afterwards the slot holds one row per response.

        Args:
            slot: holds prompts and seeds.
            sampling: how responses are drawn.
            base_step: the step whose policy samples.
            num_parts: contiguous slices of the prompts (np.array_split), each of which can be fetched, as a part of the
                slot, as soon as its last response has ended.
            on_part: called with the number of a part, from 1, when it can be fetched; perhaps more than once, or not
                at all before this returns.

        Raises:
            WrongPolicy: the responses come from the weights of another step.
        """
        place = Place(role=self.role, step=slot.step, method="Generate")

        def on_ready(part: worker_pb2.PartReady) -> None:
            _check_policy(part.policy_version, base_step, place)
            on_part(part.part)

        header = self._slot_header("Generate", slot, base_step)
        request = actor_pb2.GenerateRequest(
            header=header, slot=slot, sampling=sampling, num_parts=num_parts if num_parts > 1 else 0
        )
        reply = await self._command("Generate", slot.step, self._actor.Generate, request, on_ready)
        _check_policy(reply.policy_version, base_step, place)
        return reply

    async def compute_log_probs(
        self, slot: batch_pb2.Slot, model: actor_pb2.PolicyModel, *, base_step: int
    ) -> CommandReply:
        """Adds old_log_probs (policy) or ref_log_probs (reference) to the slot."""
        header = self._slot_header("ComputeLogProbs", slot, base_step, model)
        request = actor_pb2.ComputeLogProbsRequest(header=header, slot=slot, model=model)
        return await self._command("ComputeLogProbs", slot.step, self._actor.ComputeLogProbs, request)

    async def update(self, slot: batch_pb2.Slot, *, base_step: int, advance_only: bool = False) -> CommandReply:
        """One PPO update, which commits the slot's step; with `advance_only` the weights stay."""
        request = actor_pb2.ActorUpdateRequest(
            header=self._slot_header("Update", slot, base_step), slot=slot, advance_only=advance_only
        )
        return await self._command("Update", slot.step, self._actor.Update, request)


def _check_policy(version: int, expected: int, place: Place) -> None:
    """Responses of other weights than those of the step would train as if they were on-policy."""
    if version != expected:
        raise WrongPolicy(
            f"the responses were sampled with the weights of step {version}, expected those of step {expected}", place
        )


class CriticClient(WorkerClient):
    """The critic: the value model."""

    role = "critic"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._critic = critic_pb2_grpc.CriticServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def compute_values(self, slot: batch_pb2.Slot, *, base_step: int) -> CommandReply:
        """Adds values to the slot."""
        header = self._slot_header("ComputeValues", slot, base_step)
        request = critic_pb2.ComputeValuesRequest(header=header, slot=slot)
        return await self._command("ComputeValues", slot.step, self._critic.ComputeValues, request)

    async def update(self, slot: batch_pb2.Slot, *, base_step: int) -> CommandReply:
        """One update of the value model, which commits the slot's step."""
        request = critic_pb2.CriticUpdateRequest(header=self._slot_header("Update", slot, base_step), slot=slot)
        return await self._command("Update", slot.step, self._critic.Update, request)
