"""The gRPC clients with which the controller calls the worker groups: what all roles have, then one class per role.

All roles have the handshake, batches, checkpoints, and the computations of the frozen models that a worker may host.
"""

import asyncio
import operator
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import grpc
import grpc.aio

from controller.workers.command import (
    DEFAULT_LIMITS,
    CommandReply,
    EventCallback,
    Limits,
    ProgressCallback,
    ReconnectDeadline,
    RunningCommand,
    clock_offset_s,
    repeat_until_answered,
)
from splitppo import __version__
from splitppo.batch import Batch
from splitppo.clock import unix_s
from splitppo.config import DataConfig
from splitppo.config.section import RoleName
from splitppo.config.sections.evaluation import EvaluationConfig
from splitppo.config.sections.rollout import RolloutConfig
from splitppo.rpc.codec import encode_messages, receive_batch
from splitppo.rpc.connection_failures import connection_hint, handshake_failure
from splitppo.rpc.credentials import PLAINTEXT, Credentials
from splitppo.rpc.errors import (
    Busy,
    DeadlineExceeded,
    Internal,
    Place,
    Unauthenticated,
    Unavailable,
    WrongPolicy,
    WrongState,
    WrongStep,
    error_from_rpc,
)
from splitppo.rpc.request_id import PROTOCOL_VERSION, request_id
from splitppo.rpc.software_version import why_versions_differ
from splitppo.rpc.wire_format import MAX_REQUEST_BYTES, divide
from splitppo.run_folder.processes import Group, Rank
from splitppo.v1 import (
    actor_pb2,
    actor_pb2_grpc,
    batch_pb2,
    conversation_pb2,
    critic_pb2,
    critic_pb2_grpc,
    reference_pb2,
    reference_pb2_grpc,
    reward_model_pb2,
    reward_model_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    teacher_pb2,
    teacher_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

T = TypeVar("T")

# The timeout of one attempt to reach a starting worker, so that a silent address does not take the whole deadline.
_REACH_TIMEOUT_S = 5.0
_REACH_PAUSE_S = 0.1
_UNARY_TIMEOUT_S = 10.0
# The states of a worker that takes no more commands and ends soon.
_ENDING = {
    worker_pb2.WORKER_STATE_DRAINING: "it is draining",
    worker_pb2.WORKER_STATE_FAILED: "it has failed and ends",
}
_MAX_LOAD_ATTEMPTS = 5
_WORKER_SERVICE = "/splitppo.v1.WorkerService"
# The commands after which the worker is at another step.
_MOVES_THE_STEP = ("Update", "LoadCheckpoint", "SyncWeights")


@dataclass(frozen=True)
class Caller:
    """One start of a controller, with the names by which the controller introduces itself to workers.

    Attributes:
        run_id: the id of the run.
        epoch: the number of this start, which is the fencing token.
        config_digest: the digest of the sections that shape the worker (splitppo/config/worker_digest.py).
        nonce: the name of a file in the run folder that the worker must see.
        connection: the number of the controller's connection. Over a new connection, the same step is another command.
    """

    run_id: str
    epoch: int
    config_digest: str = ""
    nonce: str = ""
    connection: int = 0


@dataclass(frozen=True)
class Traffic:
    """Counts the batch data that a client has sent and received: bytes of columns, seconds in PutBatch and GetBatch."""

    bytes_sent: int = 0
    bytes_received: int = 0
    transfer_s: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(*map(operator.sub, astuple(self), astuple(other)))


class WorkerClient:
    """The gRPC client of one worker group of any role, for use in one asyncio event loop.

    Every method raises WireError (splitppo/rpc/errors.py) with role, step and method in its message. A call of a worker
    that is unreachable or busy is repeated for `limits.reconnect_timeout_s`. A command is repeated under its request
    id, so that it joins the running command or gets the stored reply.
    """

    role: ClassVar[RoleName]
    role_service: ClassVar[type[Any]] = worker_pb2_grpc.WorkerServiceStub  # the role's own service, as a stub

    def __init__(
        self,
        address: str,
        caller: Caller,
        limits: Limits = DEFAULT_LIMITS,
        on_progress: ProgressCallback = lambda *_: None,
        credentials: Credentials = PLAINTEXT,
    ) -> None:
        self.worker = worker_pb2.HandshakeResponse()
        self.committed_step = 0
        self.traffic = Traffic()
        self._limits = limits
        self._on_progress = on_progress
        self._credentials = credentials
        self._status = worker_pb2.GetStatusResponse()
        self._clock_offset_s = 0.0  # worker minus controller
        self._num_loads = 0
        self._open(address, caller)

    def _open(self, address: str, caller: Caller) -> None:
        """Opens a channel to the worker and makes the stubs of all services that a worker may have.

        Batches have methods of their own on it: the codec serialises and parses their messages.
        """
        self.address = address
        self._caller = caller
        self._channel = self._credentials.channel(address)
        self._worker = worker_pb2_grpc.WorkerServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._role = self.role_service(self._channel)
        self._reference = reference_pb2_grpc.ReferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._reward_model = reward_model_pb2_grpc.RewardModelServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._teacher = teacher_pb2_grpc.TeacherServiceStub(self._channel)  # type: ignore[no-untyped-call]
        # The batch streams, with messages that the codec serialises and parses.
        self._put_parts = self._channel.stream_unary(
            f"{_WORKER_SERVICE}/PutBatch", None, worker_pb2.PutBatchResponse.FromString
        )
        self._get_parts = self._channel.unary_stream(
            f"{_WORKER_SERVICE}/GetBatch", worker_pb2.GetBatchRequest.SerializeToString, None
        )

    async def close(self) -> None:
        """Closes the client's gRPC channel; commands that run in the worker continue."""
        await self._channel.close(None)

    @property
    def group(self) -> Group:
        """The processes of the group, as it has told them in its answer to `handshake`."""
        ranks = [Rank(process.rank, process.pid, process.host) for process in self.worker.processes]
        return Group(self.role, self.address, self.worker.instance_id, ranks)

    @property
    def connection(self) -> int:
        """The number of the controller's connection that this client belongs to; `reopen` changes it."""
        return self._caller.connection

    async def reopen(self, address: str, connection: int) -> None:
        """Replaces the channel, because the group was started again; `handshake` must be called next."""
        await self.close()
        self._open(address, replace(self._caller, connection=connection))

    async def handshake(self, timeout_s: float) -> worker_pb2.HandshakeResponse:
        """Makes the worker accept this controller as its caller once it is reachable; returns the worker's answer.

        Raises:
            Unavailable: the worker could not be reached in time; the message names the address.
            WrongState: the worker has another version or role, or refuses this controller.
            WireError: the worker refuses this controller for another reason.
        """
        await self._wait_until_reached(timeout_s)
        worker = await self._repeat("Handshake", None, self._introduce)
        if because := why_versions_differ("this controller", f"the {self.role} at {self.address}", worker):
            raise WrongState(because)
        if (role := worker_pb2.Role.Name(worker.role).removeprefix("ROLE_").lower()) != self.role:
            raise WrongState(f"the worker at {self.address} is a {role}, expected the {self.role}")
        self.worker = worker
        self.committed_step = worker.committed_step
        self._status = await self.get_status()
        return worker

    async def _wait_until_reached(self, timeout_s: float) -> None:
        """Polls the worker until it answers and can take commands (neither ending nor failed), or raises."""
        deadline = time.monotonic() + timeout_s
        reason = ""
        while True:
            remaining_s = deadline - time.monotonic()
            try:
                timeout_left_s = max(0.1, min(_REACH_TIMEOUT_S, remaining_s))
                status = await self._worker.GetStatus(worker_pb2.GetStatusRequest(), timeout=timeout_left_s)
            except grpc.RpcError as failed:
                error = error_from_rpc(failed)
                if not isinstance(error, Unavailable | DeadlineExceeded | Busy):
                    raise error.at(Place(role=self.role, method="Handshake")) from failed
                if because := handshake_failure(error.message):
                    raise Unauthenticated(f"the {self.role} at {self.address} is not trusted: {because}") from failed
                is_timeout = failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                was_cut_short = is_timeout and remaining_s < _REACH_TIMEOUT_S  # says less than an earlier reason
                if not reason or not was_cut_short:
                    reason = f"{error.message}{connection_hint(error.message)}"
            else:
                if status.state not in _ENDING:
                    return
                reason = _ENDING[status.state]
            if remaining_s <= _REACH_PAUSE_S:
                where = f"the {self.role} at {self.address}"
                raise Unavailable(f"{where} cannot be reached within {timeout_s:g} s: {reason}")
            await asyncio.sleep(_REACH_PAUSE_S)

    async def _introduce(self) -> worker_pb2.HandshakeResponse:
        """Sends the handshake, returns the worker's answer, and notes by how much the worker's clock differs."""
        request = worker_pb2.HandshakeRequest(
            protocol_version=PROTOCOL_VERSION,
            software_version=__version__,
            run_id=self._caller.run_id,
            epoch=self._caller.epoch,
            config_digest=self._caller.config_digest,
            nonce=self._caller.nonce,
        )
        sent_s = unix_s()
        worker: worker_pb2.HandshakeResponse = await self._worker.Handshake(request, timeout=_UNARY_TIMEOUT_S)
        self._clock_offset_s = clock_offset_s(worker.unix_ns / 1e9, sent_s, unix_s())
        return worker

    async def get_status(self) -> worker_pb2.GetStatusResponse:
        """Asks the worker for its status and returns it. The worker answers at once, also while its engine is busy."""
        request = worker_pb2.GetStatusRequest()
        return await self._repeat("GetStatus", None, lambda: self._worker.GetStatus(request, timeout=_UNARY_TIMEOUT_S))

    def is_fresh_at(self, step: int) -> bool:
        """Returns True if `step` is 0 and the worker still has its initial model and no rows: it need not load."""
        status = self._status
        is_untouched = status.state == worker_pb2.WORKER_STATE_IDLE and status.committed_step == 0 and not status.slots
        return step == self._num_loads == 0 and is_untouched

    async def put_batch(self, slot: batch_pb2.Slot, batch: Batch) -> None:
        """Sends a batch to the worker: creates the slot, or adds columns to an existing slot with equally many rows."""

        async def put() -> None:
            header, chunks = encode_messages(batch, slot)
            opening = worker_pb2.PutBatchHeader(run_id=self._caller.run_id, epoch=self._caller.epoch, batch=header)

            async def messages() -> AsyncIterator[bytes]:
                yield worker_pb2.PutBatchRequest(header=opening).SerializeToString()
                for chunk in chunks:
                    yield chunk

            started_s = time.perf_counter()
            response = await self._put_parts(messages(), timeout=self._limits.progress_timeout_s)
            if response.received_bytes != batch.num_bytes:
                raise Internal(f"the worker took {response.received_bytes} of {batch.num_bytes} bytes")
            self.traffic += Traffic(bytes_sent=batch.num_bytes, transfer_s=time.perf_counter() - started_s)

        await self._repeat("PutBatch", slot.step, put)

    async def get_batch(self, slot: batch_pb2.Slot, columns: Sequence[str]) -> Batch:
        """Fetches the named columns of a slot from the worker, and returns them as a `Batch`."""
        caller = self._caller
        limits = self._limits
        request = worker_pb2.GetBatchRequest(run_id=caller.run_id, epoch=caller.epoch, slot=slot, columns=columns)

        async def get() -> Batch:
            started_s = time.perf_counter()
            call = self._get_parts(request, timeout=limits.progress_timeout_s)
            sent, batch = await receive_batch(call, limits.max_batch_bytes, message_type=worker_pb2.GetBatchResponse)
            if sent != slot or set(batch.columns) != set(columns):
                raise Internal(f"the worker sent {', '.join(batch.columns)}, asked for {', '.join(columns)}")
            self.traffic += Traffic(bytes_received=batch.num_bytes, transfer_s=time.perf_counter() - started_s)
            return batch

        return await self._repeat("GetBatch", slot.step, get)

    async def save_checkpoint(self, *, base_step: int, with_hf_model: bool = False) -> CommandReply:
        """Makes the worker write its role's part of the checkpoint of `base_step`; returns when the part is durable."""
        request = worker_pb2.SaveCheckpointRequest(with_hf_model=with_hf_model)
        return await self._command("SaveCheckpoint", request, base_step, step=base_step, service=self._worker)

    async def load_checkpoint(self, step: int) -> CommandReply:
        """Makes the worker load its part of the checkpoint of `step` (0: initial model), whatever step is committed."""
        return await self._load("LoadCheckpoint", worker_pb2.LoadCheckpointRequest(step=step), step, self._worker)

    async def _load(self, method: str, request: Any, step: int, service: Any = None) -> CommandReply:
        """Makes a command that replaces the weights, whatever step is committed."""
        for attempt in range(1, _MAX_LOAD_ATTEMPTS + 1):
            base_step = (await self.get_status()).committed_step
            self._num_loads += 1
            try:
                return await self._command(method, request, base_step, step=step, service=service)
            except WrongStep:
                # A command that was still running has committed in between.
                if attempt == _MAX_LOAD_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    async def compute_weights_digest(self) -> str:
        """Asks the worker for the sha256 of its weights, which must be those of the committed step."""
        request = worker_pb2.ComputeWeightsDigestRequest()
        step = self.committed_step
        reply = await self._command("ComputeWeightsDigest", request, step, step=step, service=self._worker)
        return reply.result.weights_sha256

    async def compute_ref_log_probs(self, slot: batch_pb2.Slot, *, base_step: int) -> CommandReply:
        """Makes the worker add the column ref_log_probs to a slot; this group must host the reference model."""
        request = reference_pb2.ComputeRefLogProbsRequest(slot=slot)
        return await self._command("ComputeRefLogProbs", request, base_step, service=self._reference)

    async def compute_reward_scores(self, slot: batch_pb2.Slot, *, base_step: int) -> CommandReply:
        """Makes the worker add rm_scores to a slot with reward_tokens; this group must host the reward model."""
        request = reward_model_pb2.ComputeRewardScoresRequest(slot=slot)
        return await self._command("ComputeRewardScores", request, base_step, service=self._reward_model)

    async def compute_teacher_log_probs(self, slot: batch_pb2.Slot, *, base_step: int, num_ids: int) -> CommandReply:
        """Makes the worker add the teachers' columns to a slot; this group must host the teachers.

        `num_ids` is the number of tokens of the tokenizer: only these can be among the most likely ones.
        """
        request = teacher_pb2.ComputeTeacherLogProbsRequest(slot=slot, num_ids=num_ids)
        return await self._command("ComputeTeacherLogProbs", request, base_step, service=self._teacher)

    async def _command(
        self,
        method: str,
        request: Any,
        base_step: int,
        *,
        step: int | None = None,
        service: Any = None,
        on_event: EventCallback = lambda _: None,
    ) -> CommandReply:
        """Fills in the header of a command's request, sends the request, and waits for the command's reply.

        Without `step`, the command works on the slot that the request names, and belongs to the slot's step. `service`
        is the gRPC stub to call, by default that of the role's own service.
        """
        run_id = self._caller.run_id
        epoch = self._caller.epoch
        parts: tuple[int, ...] = ()
        if step is None:
            step = request.slot.step
            parts = (request.slot.kind, request.slot.part)
        # The same step is another command after a checkpoint was loaded.
        key = request_id(run_id, epoch, step, method, self._caller.connection, self._num_loads, *parts)
        header = worker_pb2.CommandHeader(run_id=run_id, epoch=epoch, base_step=base_step, request_id=key)
        request.header.CopyFrom(header)
        place = Place(role=self.role, step=step, method=method)
        offset_s = self._clock_offset_s
        on_progress = self._on_progress
        command = RunningCommand(place, self._limits, offset_s, self.get_status, on_progress, on_event)
        reply = await command.run(lambda: getattr(service or self._role, method)(request))
        if method in _MOVES_THE_STEP:  # a checkpoint may be durable when later steps are done
            self.committed_step = reply.result.committed_step
        return reply

    async def _repeat(self, method: str, step: int | None, attempt: Callable[[], Awaitable[T]]) -> T:
        place = Place(role=self.role, step=step, method=method)
        return await repeat_until_answered(attempt, ReconnectDeadline(self._limits.reconnect_timeout_s), place)


class SamplingClient(WorkerClient):
    """The controller's gRPC client of a group that offers the RPC Generate."""

    async def generate(
        self,
        slot: batch_pb2.Slot,
        sampling: actor_pb2.SamplingParams,
        *,
        base_step: int,
        num_parts: int = 1,
        max_step_tokens: int = 0,
        sleep_after: bool = False,
        on_part: Callable[[int], None] = lambda _: None,
        conversation: conversation_pb2.Conversation | None = None,
        on_turns: Callable[[conversation_pb2.TurnsEnded], None] = lambda _: None,
    ) -> CommandReply:
        """Makes the group sample responses to a slot's prompts by the slot's seeds; the slot then has a row for each.

        The responses come in `num_parts` parts, in the order in which they end. A part can be fetched, with the column
        `places`, as soon as its last response has ended; the last parts may be empty. `on_part` is called with the
        number of a finished part, from 1, perhaps several times for a part, and perhaps not before this method returns.
        With a `conversation`, `on_turns` is called with the turns that have ended, perhaps several times for a turn;
        each turn then needs a reply (`reply`), except the last one of a response. With `sleep_after` the group has
        given back the memory of its devices when this method returns.

        If the slot has the columns `begun_responses` and `begun_log_probs`, its responses go on after these tokens.
        With `max_step_tokens` at most so many tokens of each response are sampled, and the column `unfinished` says
        which responses go on.

        Raises:
            WrongPolicy: the responses were sampled with the weights of another step.
        """

        def check_policy(version: int) -> None:
            if version != base_step:  # the update would take them for on-policy
                sampled = f"the responses were sampled with the weights of step {version}"
                place = Place(role=self.role, step=slot.step, method="Generate")
                raise WrongPolicy(f"{sampled}, expected those of step {base_step}", place)

        def on_event(event: worker_pb2.CommandEvent) -> None:
            if event.HasField("part"):
                check_policy(event.part.policy_version)
                on_part(event.part.part)
            elif event.HasField("turns"):
                on_turns(event.turns)

        request = actor_pb2.GenerateRequest(
            slot=slot,
            sampling=sampling,
            num_parts=num_parts if num_parts > 1 else 0,
            max_step_tokens=max_step_tokens,
            sleep_after=sleep_after,
            conversation=conversation,
        )
        reply = await self._command("Generate", request, base_step, on_event=on_event)
        check_policy(reply.result.policy_version)
        return reply

    async def reply(self, slot: batch_pb2.Slot, replies: Sequence[conversation_pb2.TurnReply]) -> None:
        """Answers turns of the generation with a conversation that runs on a slot; may be called twice for a turn.

        Raises:
            InvalidArgument: one of the replies is impossible.
            WrongState: no such generation is running; it may have ended with these replies, if they had to be sent
                again.
        """
        run_id = self._caller.run_id
        epoch = self._caller.epoch
        header = conversation_pb2.ReplyRequest(run_id=run_id, epoch=epoch, slot=slot)
        for share in divide(replies, MAX_REQUEST_BYTES - header.ByteSize()):
            request = conversation_pb2.ReplyRequest(run_id=run_id, epoch=epoch, slot=slot, replies=share)
            await self._repeat("Reply", slot.step, partial(self._role.Reply, request, timeout=_UNARY_TIMEOUT_S))


class ActorClient(SamplingClient):
    """The controller's gRPC client of the actor group; each method calls the RPC of the same name."""

    role = "actor"
    role_service = actor_pb2_grpc.ActorServiceStub

    async def publish_weights(self, *, base_step: int, keep_from: int, save_hf_model: bool = False) -> CommandReply:
        """Makes the actor write its weights as files; `manifest_sha256` of the result names exactly this version.

        `keep_from` is the oldest version that stays; `save_hf_model` also keeps the weights as a Hugging Face folder.
        """
        request = actor_pb2.PublishWeightsRequest(keep_from=keep_from, save_hf_model=save_hf_model)
        return await self._command("PublishWeights", request, base_step, step=base_step)

    async def compute_log_probs(self, slot: batch_pb2.Slot, *, base_step: int) -> CommandReply:
        """Makes the actor add the column old_log_probs, the policy's log-probs of the response tokens, to a slot."""
        return await self._command("ComputeLogProbs", actor_pb2.ComputeLogProbsRequest(slot=slot), base_step)

    async def update(
        self,
        slot: batch_pb2.Slot,
        *,
        base_step: int,
        total_steps: int = 0,
        terms: actor_pb2.LossTerms | None = None,
        advance_only: bool = False,
    ) -> CommandReply:
        """Makes one PPO update of the policy, which commits the slot's step; `advance_only` keeps the weights as is.

        `total_steps` is the number of steps of the run, which learning rates may need; 0 says nothing. `terms` are the
        terms of the loss, by default those of the worker's configuration.
        """
        request = actor_pb2.ActorUpdateRequest(
            slot=slot, advance_only=advance_only, loss_terms=terms, total_steps=total_steps
        )
        return await self._command("Update", request, base_step)


class CriticClient(WorkerClient):
    """The controller's gRPC client of the critic group; each method calls the RPC of the same name."""

    role = "critic"
    role_service = critic_pb2_grpc.CriticServiceStub

    async def compute_values(self, slot: batch_pb2.Slot, *, base_step: int) -> CommandReply:
        """Makes the critic compute the values of the slot's responses, and add the column values to the slot."""
        return await self._command("ComputeValues", critic_pb2.ComputeValuesRequest(slot=slot), base_step)

    async def update(
        self, slot: batch_pb2.Slot, *, base_step: int, total_steps: int = 0, num_epochs: int = 0
    ) -> CommandReply:
        """Makes one update of the value model from the slot's rows, which commits the slot's step.

        `total_steps` is the number of steps of the run, which learning rates may need; 0 says nothing. `num_epochs` is
        the number of passes over the rows; 0: critic.ppo_epochs.
        """
        request = critic_pb2.CriticUpdateRequest(slot=slot, total_steps=total_steps, num_epochs=num_epochs)
        return await self._command("Update", request, base_step)


class RolloutClient(SamplingClient):
    """The controller's gRPC client of the rollout group; `committed_step` is the version that the group holds."""

    role = "rollout"
    role_service = rollout_pb2_grpc.RolloutServiceStub

    async def sync_weights(self, version: int, manifest_sha256: str) -> CommandReply:
        """Makes the group load a published version, whatever version it holds; see rollout.proto for the errors."""
        request = rollout_pb2.SyncWeightsRequest(version=version, manifest_sha256=manifest_sha256)
        return await self._load("SyncWeights", request, version)


class RewardClient(WorkerClient):
    """The controller's gRPC client of the reward group, which has neither checkpoints nor a step."""

    role = "reward"


def sampling_params(section: RolloutConfig | EvaluationConfig, data: DataConfig) -> actor_pb2.SamplingParams:
    """Returns the protobuf message with temperature, top_p, top_k and response limit for the RPC Generate."""
    drawn = section.model_dump(include={"temperature", "top_p", "top_k"})
    return actor_pb2.SamplingParams(**drawn, max_response_length=data.max_response_length)
