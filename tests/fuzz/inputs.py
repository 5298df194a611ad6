"""The inputs of the fuzzer: input number i of a seed is always the same.

Nothing in here may be a command that a service should obey and that changes its weights, so that weights, step and
ledger must stay as they are: an Update finds no advantages or returns, or such as are not finite, or it is one of
another run or step; a LoadCheckpoint names another run, or a step that was never saved; a SyncWeights names a digest
that no manifest has. All else may be valid.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from splitppo import __version__
from splitppo.batch import Batch
from splitppo.v1 import batch_pb2, conversation_pb2, worker_pb2
from tests.fuzz.commands import ACTOR, CRITIC, ROLLOUT, Role, command_requests, make_case
from tests.support.batch_streams import encode
from tests.support.models import VOCABULARY

WORKER = "/splitppo.v1.WorkerService"
HEALTH, REFLECTION = "/grpc.health.v1.Health", "/grpc.reflection."
PUT = f"{WORKER}/PutBatch"
# Streams without an end: the first answer is enough.
ENDLESS = frozenset((f"{HEALTH}/Watch",))
EXTREMES = (0, 1, 2, 3, 127, 128, 255, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1, -1)
METADATA = ("right token", "right token", "right token", "right token", "no token", "wrong token", "two tokens", "odd")


@dataclass(frozen=True)
class Target:
    """The service as the fuzzer knows it: a controller that has introduced itself, at a committed step."""

    role: Role
    run_id: str
    epoch: int
    committed_step: int
    config_digest: str
    nonce: str


@dataclass(frozen=True)
class Input:
    """One call.

    Attributes:
        method: full name of the RPC.
        kind: how it was made.
        messages: what is sent, serialised.
        pause_s: before every message but the first.
        metadata: one of METADATA.
        gives_up: the caller cancels after the last message.
        before: batches that are put before it, each the messages of a PutBatch.
        must_fail: it can have no result.
    """

    method: str
    kind: str
    messages: Sequence[bytes]
    pause_s: float = 0.0
    metadata: str = "right token"
    gives_up: bool = False
    before: Sequence[Sequence[bytes]] = ()
    must_fail: bool = False


class Inputs:
    """Makes inputs for a target."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target = target
        self._seed = seed
        self._kinds: Sequence[tuple[int, Callable[[random.Random], Input]]] = (
            (20, self._random_bytes),
            (30, self._mutated),
            (14, self._valid),
            (30, self._stream),
            (60, self._command),
            (2, self._oversize),
            (2, self._unknown_method),
        )

    def __getitem__(self, index: int) -> Input:
        draw = random.Random(f"{self._seed}-{index}")
        weights, makers = zip(*self._kinds, strict=True)
        return draw.choices(makers, weights)[0](draw)

    # Whole calls.

    def _random_bytes(self, draw: random.Random) -> Input:
        method = draw.choice(list(self._templates(draw)))
        messages = [_noise(draw) for _ in range(draw.choice((1, 1, 1, 1, 2, 5)))]
        if draw.random() < 0.01:
            return Input(method, "nothing", [], metadata=draw.choice(METADATA))
        return Input(method, "random bytes", messages, metadata=draw.choice(METADATA))

    def _mutated(self, draw: random.Random) -> Input:
        method, message = draw.choice(list(self._templates(draw, harmless=True).items()))
        messages = [_mutate(draw, message.SerializeToString())]
        return Input(method, "mutated", messages, metadata=draw.choice(METADATA))

    def _valid(self, draw: random.Random) -> Input:
        method, message = draw.choice(list(self._templates(draw).items()))
        messages = [message.SerializeToString()] * draw.choice((1, 1, 1, 2))
        return Input(method, "valid", messages, metadata=draw.choice(METADATA), gives_up=draw.random() < 0.1)

    def _stream(self, draw: random.Random) -> Input:
        parts = self._put(draw)
        how = draw.choice(list(_DISTURBANCES))
        # Rarely, since each of them waits until the service gives it up.
        pause_s = 0.7 if how == "slow" and draw.random() < 0.05 else 0.0
        parts = _DISTURBANCES[how](draw, parts)
        gives_up = how == "cut off" and draw.random() < 0.5
        return Input(PUT, f"stream: {how}", parts, pause_s, gives_up=gives_up)

    def _command(self, draw: random.Random) -> Input:
        header = self._right_header(draw)
        case = make_case(draw, self._target.role, header, self._target.committed_step)
        return Input(
            case.method,
            f"command: {case.what or 'in order'}",
            [case.request.SerializeToString()],
            gives_up=draw.random() < 0.02,
            before=[self._messages(*batch) for batch in case.batches],
            must_fail=bool(case.what),
        )

    def _oversize(self, draw: random.Random) -> Input:
        if draw.random() < 0.5:
            own = [name for name in self._templates(draw) if name.startswith("/splitppo") and name != PUT]
            return Input(draw.choice(own), "oversize", [bytes(draw.choice((1 << 16, (1 << 16) + 1, 1 << 20)))])
        header = batch_pb2.BatchHeader(slot=self._slot(draw))
        if draw.random() < 0.5:
            header.num_rows = draw.choice((1 << 17, (1 << 17) + 1, 1 << 20))
            header.columns.add(name="prompts", dtype=batch_pb2.DTYPE_INT32, lengths=[0] * min(header.num_rows, 1 << 18))
            return Input(PUT, "oversize", [self._opening(header)])
        many_columns = self._opening(header) + b"\x0a\x04\x1a\x02\x1a\x00" * draw.choice((100, 10_000, 200_000))
        return Input(PUT, "oversize", [many_columns])

    def _unknown_method(self, draw: random.Random) -> Input:
        service = draw.choice((WORKER, CRITIC, ACTOR, HEALTH, "/no.such.Service"))
        name = draw.choice(("Shutdown", "update", "Update/", "..", "a" * 2000))
        return Input(f"{service}/{name}", "unknown method", [_noise(draw)], metadata=draw.choice(METADATA))

    # Messages.

    def _templates(self, draw: random.Random, *, harmless: bool = False) -> dict[str, Message]:
        """A message for every RPC; `harmless`: a change of some bytes makes no command that changes the weights."""
        header, slot = self._header(draw), self._slot(draw)
        foreign = worker_pb2.CommandHeader(
            run_id="quite-another-run", epoch=self._target.epoch, base_step=header.base_step, request_id="load"
        )
        load = worker_pb2.LoadCheckpointRequest(header=foreign, step=draw.choice(EXTREMES[:8]))
        if not harmless and draw.random() < 0.5:
            load = worker_pb2.LoadCheckpointRequest(header=header, step=draw.choice((12345, 1 << 40, -1)))
        target, version = self._target, draw.choice(("v1", "v1alpha"))
        commands = command_requests(draw, target.role, header, slot)
        if harmless:
            for name in commands:
                if name.endswith("/Update"):  # an actor's may need no rows
                    commands[name] = command_requests(draw, target.role, foreign, slot)[name]
        replies = {"actor": f"{ACTOR}/Reply", "rollout": f"{ROLLOUT}/Reply"}
        return {
            **commands,
            **({replies[target.role]: self._replies(draw, slot)} if target.role in replies else {}),
            f"{WORKER}/Handshake": worker_pb2.HandshakeRequest(
                protocol_version=1,
                software_version=draw.choice((__version__, "", "0.0.9")),
                run_id=target.run_id,
                epoch=target.epoch,
                config_digest=target.config_digest,
                nonce="nonce-never-written" if harmless else target.nonce,
            ),
            f"{WORKER}/GetStatus": worker_pb2.GetStatusRequest(),
            f"{WORKER}/Diagnose": worker_pb2.DiagnoseRequest(
                nonce=draw.choice(("", target.nonce, "../config.yaml", "x" * 200))
            ),
            f"{WORKER}/MeasureUpload": worker_pb2.MeasureUploadRequest(payload=bytes(draw.choice((0, 1, 1 << 14)))),
            f"{WORKER}/MeasureDownload": worker_pb2.MeasureDownloadRequest(
                num_bytes=draw.choice((0, 1, 1 << 21, (1 << 26) + 1, (1 << 64) - 1))
            ),
            PUT: worker_pb2.PutBatchRequest.FromString(self._put(draw)[0]),
            f"{WORKER}/GetBatch": worker_pb2.GetBatchRequest(
                run_id=target.run_id,
                epoch=target.epoch,
                slot=slot,
                columns=draw.sample(("prompts", "responses", "values", "no_such_column"), draw.randint(0, 4)),
            ),
            f"{WORKER}/SaveCheckpoint": worker_pb2.SaveCheckpointRequest(header=header),
            f"{WORKER}/LoadCheckpoint": load,
            f"{WORKER}/ComputeWeightsDigest": worker_pb2.ComputeWeightsDigestRequest(header=header),
            f"{HEALTH}/Check": health_pb2.HealthCheckRequest(
                service=draw.choice(("", "x", "splitppo.v1.WorkerService"))
            ),
            f"{HEALTH}/Watch": health_pb2.HealthCheckRequest(),
            f"{REFLECTION}{version}.ServerReflection/ServerReflectionInfo": reflection_pb2.ServerReflectionRequest(
                file_containing_symbol=draw.choice(("splitppo.v1.WorkerService", "nothing", ""))
            ),
        }

    def _replies(self, draw: random.Random, slot: batch_pb2.Slot) -> conversation_pb2.ReplyRequest:
        """Replies to turns that there are not, because no conversation is going on."""
        request = conversation_pb2.ReplyRequest(run_id=self._target.run_id, epoch=self._target.epoch, slot=slot)
        for _ in range(draw.choice((0, 1, 1, 3))):
            place, turn = (draw.choice((0, 1, 7, -1, (1 << 31) - 1)) for _ in range(2))
            tokens = [draw.randrange(800) for _ in range(draw.choice((0, 1, 20)))]
            request.replies.add(place=place, turn=turn, tokens=tokens, is_last=draw.random() < 0.5)
        return request

    def _right_header(self, draw: random.Random) -> worker_pb2.CommandHeader:
        return worker_pb2.CommandHeader(
            run_id=self._target.run_id,
            epoch=self._target.epoch,
            base_step=self._target.committed_step,
            request_id=f"fuzz-{draw.randrange(1 << 40)}",
        )

    def _header(self, draw: random.Random) -> worker_pb2.CommandHeader:
        header = self._right_header(draw)
        match draw.randrange(8):
            case 0:
                header.run_id = draw.choice(("", "other", "x" * 5000))
            case 1:
                header.epoch = _int64(draw)
            case 2:
                header.base_step = _int64(draw)
            case 3:
                header.request_id = draw.choice(("", "x" * 257, "same"))
        return header

    def _slot(self, draw: random.Random) -> batch_pb2.Slot:
        slot = batch_pb2.Slot(
            kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=self._target.committed_step + 1, part=draw.choice((0, 0, 0, 1, 2))
        )
        match draw.randrange(8):
            case 0:
                slot.step = _int64(draw)
            case 1:
                slot.part = draw.choice((-1, 1025, (1 << 31) - 1))
            case 2:
                slot.kind = draw.choice((0, 2, 3, 4, 5, 7))
        return slot

    def _put(self, draw: random.Random) -> list[bytes]:
        """The messages of a whole batch; most often of tokens that exist."""
        num_rows = draw.choice((1, 2, 4, 4, 4, 50))
        num_tokens = draw.choice((len(VOCABULARY), len(VOCABULARY), len(VOCABULARY), 800))
        rows = {
            name: [np.array([draw.randrange(num_tokens) for _ in range(draw.randint(1, 20))]) for _ in range(num_rows)]
            for name in draw.sample(("prompts", "responses", "seeds", "images", "image_sizes"), draw.randint(1, 3))
        }
        header, chunks = encode(Batch.from_rows(**rows), self._slot(draw))
        match draw.randrange(10):
            case 0:
                header.total_bytes = _uint64(draw)
            case 1:
                header.num_rows = _uint64(draw) & 0xFFFFFFFF
            case 2:
                header.columns[0].name = draw.choice(("", "mini_batches", "places", "values", "../../etc/passwd"))
            case 3:
                header.columns[0].dtype = draw.choice((0, 3, 99))
            case 4:
                header.columns[0].lengths[0] = draw.choice((0, (1 << 31) - 1, (1 << 32) - 1))
            case 5:
                header.columns[0].stored_rows.append(draw.choice((0, 1, num_rows, (1 << 32) - 1)))
            case 6:
                header.columns[0].stored_rows[:] = [draw.choice((0, 0, num_rows)) for _ in range(num_rows)]
        return self._messages(header, chunks)

    def _messages(self, header: batch_pb2.BatchHeader, chunks: Iterable[batch_pb2.BatchChunk]) -> list[bytes]:
        return [
            self._opening(header),
            *(worker_pb2.PutBatchRequest(chunk=chunk).SerializeToString() for chunk in chunks),
        ]

    def _opening(self, header: batch_pb2.BatchHeader) -> bytes:
        opening = worker_pb2.PutBatchHeader(run_id=self._target.run_id, epoch=self._target.epoch, batch=header)
        return worker_pb2.PutBatchRequest(header=opening).SerializeToString()


# Disturbances of a batch stream: (draw, messages) -> messages.
_DISTURBANCES: dict[str, Callable[[random.Random, list[bytes]], list[bytes]]] = {
    "whole": lambda draw, parts: parts,
    "slow": lambda draw, parts: parts,
    "reversed": lambda draw, parts: parts[::-1],
    "twice": lambda draw, parts: parts + parts,
    "two headers": lambda draw, parts: [parts[0], *parts],
    "no header": lambda draw, parts: parts[1:],
    "no chunk": lambda draw, parts: parts[:1],
    "cut off": lambda draw, parts: parts[: draw.randrange(len(parts) + 1)],
    "empty message": lambda draw, parts: [*parts[:1], b"", *parts[1:]],
    "noise between": lambda draw, parts: [*parts[:1], _noise(draw), *parts[1:]],
    "mutated header": lambda draw, parts: [_mutate(draw, parts[0]), *parts[1:]],
    "mutated chunk": lambda draw, parts: [*parts[:1], *(_mutate(draw, part) for part in parts[1:])],
}


def _noise(draw: random.Random) -> bytes:
    return draw.randbytes(int(2 ** draw.uniform(0, 12)) - 1)


def _mutate(draw: random.Random, message: bytes) -> bytes:
    """Some bytes flipped, cut out, doubled, or replaced by extreme numbers."""
    changed = bytearray(message)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed) + 1)
        match draw.randrange(6):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << draw.randrange(8)
            case 1:
                del changed[at : at + draw.randint(1, 8)]
            case 2:
                changed[at:at] = draw.randbytes(draw.randint(1, 8))
            case 3:
                changed[at:at] = changed[at : at + draw.randint(1, 64)]
            case 4:
                changed[at : at + 1] = _varint(_uint64(draw))
            case 5:
                del changed[at:]
    return bytes(changed)


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def _int64(draw: random.Random) -> int:
    return (draw.choice(EXTREMES) + (1 << 63)) % (1 << 64) - (1 << 63)


def _uint64(draw: random.Random) -> int:
    return draw.choice(EXTREMES) % (1 << 64)
