"""A gRPC server in this process that stands for a worker of any role; the test scripts its answers."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from controller.workers.clients import ActorClient, Caller
from splitppo.batch import Batch
from splitppo.clock import unix_ns
from splitppo.rpc.codec import encode_messages, receive_batch
from splitppo.rpc.errors import WireError, abort
from splitppo.v1 import (
    actor_pb2,
    actor_pb2_grpc,
    batch_pb2,
    conversation_pb2,
    critic_pb2_grpc,
    reference_pb2_grpc,
    reward_model_pb2_grpc,
    teacher_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

SLOT = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=5)
CALLER = Caller(run_id="run", epoch=2, config_digest="d" * 64, nonce="nonce")
Events = AsyncIterator[worker_pb2.CommandEvent]
Script = Callable[["FakeWorker", Any, grpc.aio.ServicerContext[Any, Any]], Events]


def progress(done: int, phase: str = "decode") -> worker_pb2.CommandEvent:
    return worker_pb2.CommandEvent(progress=worker_pb2.Progress(done=done, total=10, phase=phase))


def part(number: int, policy_version: int = 4) -> worker_pb2.CommandEvent:
    return worker_pb2.CommandEvent(part=worker_pb2.PartReady(part=number, num_parts=2, policy_version=policy_version))


def turns(*places: int, turn: int = 1) -> worker_pb2.CommandEvent:
    ended = [conversation_pb2.Turn(place=place, turn=turn, tokens=[place]) for place in places]
    return worker_pb2.CommandEvent(turns=conversation_pb2.TurnsEnded(turns=ended))


def result(**fields: Any) -> worker_pb2.CommandEvent:
    return worker_pb2.CommandEvent(result=worker_pb2.CommandResult(**{"policy_version": 4, **fields}))


async def succeed(worker: "FakeWorker", request: Any, context: Any) -> Events:
    yield result(committed_step=4, policy_version=request.header.base_step)


@dataclass
class FakeWorker(
    worker_pb2_grpc.WorkerServiceServicer,
    actor_pb2_grpc.ActorServiceServicer,
    critic_pb2_grpc.CriticServiceServicer,
    reference_pb2_grpc.ReferenceServiceServicer,
    reward_model_pb2_grpc.RewardModelServiceServicer,
    teacher_pb2_grpc.TeacherServiceServicer,
):
    """Answers each attempt of a command with the next entry of a script, and with the last entry from then on."""

    scripts: list[Script] = field(default_factory=lambda: [succeed])
    status: worker_pb2.GetStatusResponse = field(default_factory=worker_pb2.GetStatusResponse)
    greeting: worker_pb2.HandshakeResponse = field(
        default_factory=lambda: worker_pb2.HandshakeResponse(
            protocol_version=1, role=worker_pb2.ROLE_ACTOR, config_digest="d" * 64, unix_ns=unix_ns()
        )
    )
    refusals: list[WireError] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    slots: dict[int, Batch] = field(default_factory=dict)
    on_status: Callable[[worker_pb2.GetStatusResponse], None] = lambda status: None

    async def Handshake(self, request: Any, context: Any) -> worker_pb2.HandshakeResponse:
        self.requests.append(request)
        if self.refusals:
            await abort(context, self.refusals.pop(0))
        return self.greeting

    async def GetStatus(self, request: Any, context: Any) -> worker_pb2.GetStatusResponse:
        try:
            self.on_status(self.status)
        except WireError as error:
            await abort(context, error)
        return self.status

    async def PutBatch(self, parts: Any, context: Any) -> worker_pb2.PutBatchResponse:
        if self.refusals:
            await abort(context, self.refusals.pop(0))
        messages = (part.SerializeToString() async for part in parts)
        slot, batch = await receive_batch(messages, 1 << 30, lambda header: header.batch)
        self.slots[slot.step] = batch
        return worker_pb2.PutBatchResponse(received_bytes=batch.num_bytes)

    async def GetBatch(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.GetBatchResponse]:
        header, messages = encode_messages(self.slots[request.slot.step].select(request.columns), request.slot)
        if self.refusals:
            header.num_rows += 1
        yield worker_pb2.GetBatchResponse(header=header)
        for message in messages:
            yield worker_pb2.GetBatchResponse.FromString(message)

    async def Reply(self, request: Any, context: Any) -> conversation_pb2.ReplyResponse:
        self.requests.append(request)
        if self.refusals:
            await abort(context, self.refusals.pop(0))
        return conversation_pb2.ReplyResponse()

    async def _command(self, request: Any, context: Any) -> Events:
        self.requests.append(request)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        async for event in script(self, request, context):
            yield event

    Generate = ComputeLogProbs = ComputeRefLogProbs = ComputeRewardScores = ComputeValues = Update = _command
    ComputeTeacherLogProbs = _command
    SaveCheckpoint = LoadCheckpoint = ComputeWeightsDigest = _command


Connect = Callable[..., Awaitable[ActorClient]]


async def generate(client: ActorClient, **options: Any) -> Any:
    return await client.generate(SLOT, actor_pb2.SamplingParams(), base_step=4, **options)
