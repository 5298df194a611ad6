"""A plain blocking gRPC client for tests of the runtime; it uses stock stubs and nothing of the controller."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from splitppo import __version__
from splitppo.batch import Batch
from splitppo.config import load_config
from splitppo.config.section import RoleName
from splitppo.config.worker_digest import worker_digest
from splitppo.rpc.codec import BatchReceiver
from splitppo.rpc.credentials import Credentials, load_credentials
from splitppo.rpc.errors import WireError, error_from_rpc
from splitppo.v1 import (
    actor_pb2,
    actor_pb2_grpc,
    batch_pb2,
    conversation_pb2,
    critic_pb2,
    critic_pb2_grpc,
    reward_model_pb2,
    reward_model_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.support.batch_streams import add, encode

TIMEOUT_S = 60.0


def experience(step: int) -> batch_pb2.Slot:
    return batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=step)


@contextmanager
def wire_errors() -> Iterator[None]:
    """Raises what the worker raised."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error


class Client:
    """Introduces itself as the controller of one epoch."""

    def __init__(
        self,
        address: str,
        config_file: Path,
        *,
        role: RoleName = "critic",
        run_id: str = "run",
        epoch: int = 1,
        credentials: Credentials | None = None,
    ) -> None:
        self.config = load_config(config_file)
        self.address, self.role, self.run_id, self.epoch = address, role, run_id, epoch
        credentials = credentials or load_credentials(self.config.services.security, "controller")
        self.channel = credentials.channel(address, grpc)
        self.worker: Any = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.actor: Any = actor_pb2_grpc.ActorServiceStub(self.channel)
        self.critic: Any = critic_pb2_grpc.CriticServiceStub(self.channel)
        self.rollout: Any = rollout_pb2_grpc.RolloutServiceStub(self.channel)
        self.reward_model: Any = reward_model_pb2_grpc.RewardModelServiceStub(self.channel)

    def close(self) -> None:
        self.channel.close()

    def handshake(self, **changes: Any) -> worker_pb2.HandshakeResponse:
        fields: dict[str, Any] = {
            "protocol_version": 1,
            "software_version": __version__,
            "run_id": self.run_id,
            "epoch": self.epoch,
            "config_digest": worker_digest(self.config, self.role),
            "nonce": f"nonce-{secrets.token_hex(4)}",
        }
        (self.config.run.dir / fields["nonce"]).touch()
        with wire_errors():
            return self.worker.Handshake(worker_pb2.HandshakeRequest(**{**fields, **changes}), timeout=TIMEOUT_S)

    def status(self) -> worker_pb2.GetStatusResponse:
        """All but the clock: of a worker that stays as it is, it stays the same."""
        with wire_errors():
            status = self.worker.GetStatus(worker_pb2.GetStatusRequest(), timeout=TIMEOUT_S)
        status.ClearField("unix_ns")
        return status

    def put(self, slot: batch_pb2.Slot, **rows: Any) -> int:
        header, chunks = encode(Batch.from_rows(**rows), slot)
        opening = worker_pb2.PutBatchHeader(run_id=self.run_id, epoch=self.epoch, batch=header)
        parts = [
            worker_pb2.PutBatchRequest(header=opening),
            *(worker_pb2.PutBatchRequest(chunk=chunk) for chunk in chunks),
        ]
        with wire_errors():
            return self.worker.PutBatch(iter(parts), timeout=TIMEOUT_S).received_bytes

    def get(self, slot: batch_pb2.Slot, *columns: str) -> Batch:
        request = worker_pb2.GetBatchRequest(run_id=self.run_id, epoch=self.epoch, slot=slot, columns=columns)
        with wire_errors():
            parts = self.worker.GetBatch(request, timeout=TIMEOUT_S)
            receiver = BatchReceiver(next(parts).header, 1 << 30)
            add(receiver, *(part.chunk for part in parts))
        return receiver.finish()

    def header(self, base_step: int, request_id: str = "") -> worker_pb2.CommandHeader:
        return worker_pb2.CommandHeader(
            run_id=self.run_id, epoch=self.epoch, base_step=base_step, request_id=request_id or secrets.token_hex(8)
        )

    def compute_values(self, slot: batch_pb2.Slot, *, base_step: int, request_id: str = "") -> Any:
        """The stream of events."""
        request = critic_pb2.ComputeValuesRequest(header=self.header(base_step, request_id), slot=slot)
        return self.critic.ComputeValues(request, timeout=TIMEOUT_S)

    def compute_reward_scores(self, slot: batch_pb2.Slot) -> Any:
        """The stream of events."""
        request = reward_model_pb2.ComputeRewardScoresRequest(header=self.header(0), slot=slot)
        return self.reward_model.ComputeRewardScores(request, timeout=TIMEOUT_S)

    def generate(
        self,
        slot: batch_pb2.Slot,
        *,
        base_step: int,
        num_parts: int = 0,
        max_step_tokens: int = 0,
        sleep_after: bool = False,
        **sampling: Any,
    ) -> Any:
        """The stream of events."""
        params = actor_pb2.SamplingParams(**{"temperature": 1.0, "top_p": 1.0, **sampling})
        request = actor_pb2.GenerateRequest(
            header=self.header(base_step),
            slot=slot,
            sampling=params,
            num_parts=num_parts,
            max_step_tokens=max_step_tokens,
            sleep_after=sleep_after,
        )
        service = self.rollout if self.role == "rollout" else self.actor
        return service.Generate(request, timeout=TIMEOUT_S)

    def converse(
        self,
        slot: batch_pb2.Slot,
        *,
        base_step: int,
        request_id: str = "",
        num_parts: int = 0,
        timeout_s: float = TIMEOUT_S,
    ) -> Any:
        """The stream of events of a Generate with a conversation."""
        header, conversation = self.header(base_step, request_id), conversation_pb2.Conversation()
        request = actor_pb2.GenerateRequest(header=header, slot=slot, num_parts=num_parts, conversation=conversation)
        return self.actor.Generate(request, timeout=timeout_s)

    def reply(self, slot: batch_pb2.Slot, *replies: conversation_pb2.TurnReply) -> None:
        request = conversation_pb2.ReplyRequest(run_id=self.run_id, epoch=self.epoch, slot=slot, replies=replies)
        with wire_errors():
            self.actor.Reply(request, timeout=TIMEOUT_S)

    def publish(self, base_step: int, *, keep_from: int = 0) -> Any:
        """The stream of events."""
        request = actor_pb2.PublishWeightsRequest(header=self.header(base_step), keep_from=keep_from)
        return self.actor.PublishWeights(request, timeout=TIMEOUT_S)

    def sync(self, version: int, manifest_sha256: str, *, base_step: int) -> Any:
        """The stream of events."""
        header = self.header(base_step)
        request = rollout_pb2.SyncWeightsRequest(header=header, version=version, manifest_sha256=manifest_sha256)
        return self.rollout.SyncWeights(request, timeout=TIMEOUT_S)

    def update(self, step: int, *, base_step: int | None = None, request_id: str = "") -> Any:
        header = self.header(step - 1 if base_step is None else base_step, request_id)
        if self.role == "actor":
            request = actor_pb2.ActorUpdateRequest(header=header, slot=experience(step))
            return self.actor.Update(request, timeout=TIMEOUT_S)
        return self.critic.Update(
            critic_pb2.CriticUpdateRequest(header=header, slot=experience(step)), timeout=TIMEOUT_S
        )

    def save(self, base_step: int, *, request_id: str = "") -> Any:
        return self.worker.SaveCheckpoint(
            worker_pb2.SaveCheckpointRequest(header=self.header(base_step, request_id)), timeout=TIMEOUT_S
        )

    def load(self, step: int, *, base_step: int) -> Any:
        return self.worker.LoadCheckpoint(
            worker_pb2.LoadCheckpointRequest(header=self.header(base_step), step=step), timeout=TIMEOUT_S
        )

    def digest(self, base_step: int) -> str:
        request = worker_pb2.ComputeWeightsDigestRequest(header=self.header(base_step))
        return result(self.worker.ComputeWeightsDigest(request, timeout=TIMEOUT_S)).weights_sha256


def result(stream: Any) -> worker_pb2.CommandResult:
    """The result of a command, or its error as the worker raised it."""
    with wire_errors():
        *_, last = stream
    return last.result


def progress(stream: Any) -> worker_pb2.Progress:
    """The next progress of a command."""
    with wire_errors():
        return next(stream).progress


def error_of(stream: Any) -> WireError:
    """The error that a command ends with."""
    try:
        reply = result(stream)
    except WireError as error:
        return error
    raise AssertionError(f"expected an error, got {reply}")
