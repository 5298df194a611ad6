"""A PPO step by a client without SplitPPO: stubs that protoc made of proto/, grpcio, numpy and xxhash.

    python -I ppo_step.py SETTINGS.json     prints what it found, as JSON

Written from docs/protocol*.md, whose sections the functions name. SETTINGS: `stubs`, a folder with generated stubs;
`run_dir`, that of both workers; `actor` and `critic`, each with `address`, `token` and, where it speaks TLS, the files
`ca`, `cert` and `key`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import xxhash

SETTINGS = json.loads(Path(sys.argv[1]).read_text())
assert importlib.util.find_spec("splitppo") is None, "the client must have nothing of ours"
sys.path.insert(0, SETTINGS["stubs"])

from splitppo.v1 import (  # noqa: E402
    actor_pb2,
    actor_pb2_grpc,
    batch_pb2,
    critic_pb2,
    critic_pb2_grpc,
    reference_pb2,
    reference_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

TIMEOUT_S = 240.0
CHUNK_BYTES = 1 << 20
NUM_SAMPLES, MAX_RESPONSE = 2, 8
GAMMA, LAM = 1.0, 0.95
PROMPTS = [[5, 9, 11, 30], [7, 8], [12, 3, 3, 3, 40, 41], [20]]
SAMPLING = actor_pb2.SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_response_length=MAX_RESPONSE)

Rows = list[list[Any]]
_OF_TOKENS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "advantages", "returns")
DTYPES = {
    "prompts": (batch_pb2.DTYPE_INT32, "<i4"),
    "seeds": (batch_pb2.DTYPE_INT64, "<i8"),
    "responses": (batch_pb2.DTYPE_INT32, "<i4"),
    **dict.fromkeys(_OF_TOKENS, (batch_pb2.DTYPE_FLOAT32, "<f4")),
}


def encode(slot: batch_pb2.Slot, columns: dict[str, Rows]) -> tuple[batch_pb2.BatchHeader, list[batch_pb2.BatchChunk]]:
    """Section "Batches"."""
    header, payload = batch_pb2.BatchHeader(slot=slot), b""
    for name, rows in columns.items():
        dtype, layout = DTYPES[name]
        header.num_rows = len(rows)
        header.columns.add(name=name, dtype=dtype, lengths=[len(row) for row in rows])
        payload += b"".join(np.asarray(row, layout).tobytes() for row in rows)
    header.total_bytes = len(payload)
    chunks = []
    for at in range(0, len(payload), CHUNK_BYTES):
        piece = payload[at : at + CHUNK_BYTES]
        chunks.append(batch_pb2.BatchChunk(offset=at, payload=piece, checksum=xxhash.xxh3_64_intdigest(piece)))
    return header, chunks


def decode(messages: Iterator[worker_pb2.GetBatchResponse]) -> dict[str, Rows]:
    """Section "Batches"."""
    header, payload = next(messages).header, b""
    for message in messages:
        assert message.chunk.offset == len(payload)
        assert message.chunk.checksum == xxhash.xxh3_64_intdigest(message.chunk.payload)
        payload += message.chunk.payload
    assert len(payload) == header.total_bytes
    columns: dict[str, Rows] = {}
    at = 0
    for column in header.columns:
        dtype, layout = DTYPES[column.name]
        assert (column.dtype, len(column.lengths)) == (dtype, header.num_rows)
        values = np.frombuffer(payload, layout, sum(column.lengths), at)
        at += values.nbytes
        columns[column.name] = [row.tolist() for row in np.split(values, np.cumsum(column.lengths)[:-1])]
    return columns


class Worker:
    """A worker, as its caller sees it; sections "Connecting", "Handshake" and "Commands"."""

    def __init__(self, role: str, run_id: str, epoch: int) -> None:
        how = SETTINGS[role]
        self.run_id, self.epoch = run_id, epoch
        if "ca" in how:
            ca, cert, key = (Path(how[name]).read_bytes() for name in ("ca", "cert", "key"))
            self.channel = grpc.secure_channel(how["address"], grpc.ssl_channel_credentials(ca, key, cert))
        else:
            self.channel = grpc.insecure_channel(how["address"])
        self.options = {"metadata": [("authorization", f"Bearer {how['token']}")], "timeout": TIMEOUT_S}
        self.worker = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.service = {"actor": actor_pb2_grpc.ActorServiceStub, "critic": critic_pb2_grpc.CriticServiceStub}[role](
            self.channel
        )
        self.reference = reference_pb2_grpc.ReferenceServiceStub(self.channel)

    def status(self) -> worker_pb2.GetStatusResponse:
        return self.worker.GetStatus(worker_pb2.GetStatusRequest(), **self.options)

    def handshake(self, nonce: str) -> worker_pb2.HandshakeResponse:
        status = self.status()
        assert status.protocol_version == 1
        request = worker_pb2.HandshakeRequest(
            protocol_version=1,
            run_id=self.run_id,
            epoch=self.epoch,
            config_digest=status.config_digest,
            nonce=nonce,
        )
        return self.worker.Handshake(request, **self.options)

    def put(self, slot: batch_pb2.Slot, **columns: Rows) -> int:
        header, chunks = encode(slot, columns)
        return self.send(header, chunks)

    def send(self, header: batch_pb2.BatchHeader, chunks: list[batch_pb2.BatchChunk]) -> int:
        opening = worker_pb2.PutBatchHeader(run_id=self.run_id, epoch=self.epoch, batch=header)
        parts = [
            worker_pb2.PutBatchRequest(header=opening),
            *(worker_pb2.PutBatchRequest(chunk=chunk) for chunk in chunks),
        ]
        return int(self.worker.PutBatch(iter(parts), **self.options).received_bytes)

    def get(self, slot: batch_pb2.Slot, *columns: str) -> dict[str, Rows]:
        request = worker_pb2.GetBatchRequest(run_id=self.run_id, epoch=self.epoch, slot=slot, columns=columns)
        return decode(iter(self.worker.GetBatch(request, **self.options)))

    def command(self, method: Any, request: Any, base_step: int, request_id: str) -> worker_pb2.CommandResult:
        header = {"run_id": self.run_id, "epoch": self.epoch, "base_step": base_step, "request_id": request_id}
        request.header.CopyFrom(worker_pb2.CommandHeader(**header))
        events = list(method(request, **self.options))
        assert [event.WhichOneof("event") for event in events].count("result") == 1
        assert events[-1].HasField("result")
        return events[-1].result


def advantages_and_returns(rewards: Rows, values: Rows) -> tuple[Rows, Rows]:
    """GAE over each response, then advantages of mean 0 and variance 1 over all tokens."""
    advantages, returns = [], []
    for reward, value in zip(rewards, values, strict=True):
        running, following, row = 0.0, 0.0, []
        for r, v in zip(reversed(reward), reversed(value), strict=True):
            running = r + GAMMA * following - v + GAMMA * LAM * running
            following = v
            row.insert(0, running)
        advantages.append(row)
        returns.append([a + v for a, v in zip(row, value, strict=True)])
    flat = np.concatenate(advantages)
    scale = float(np.sqrt(flat.var(ddof=1)) + 1e-8)
    return [[(a - float(flat.mean())) / scale for a in row] for row in advantages], returns


def refusal(call: Any) -> dict[str, Any]:
    """Section "Errors": the status code, and whether the trailer names the reason."""
    try:
        call()
    except grpc.RpcError as error:
        trailer = dict(error.trailing_metadata())["grpc-status-details-bin"]
        return {"code": error.code().name, "details": error.details(), "trailer": trailer.decode("latin-1")}
    return {}


def step(actor: Worker, critic: Worker, slot: batch_pb2.Slot) -> dict[str, Any]:
    """Section "A run and a step": from prompts to both updates."""
    base = slot.step - 1
    seeds = [[1000 * row + sample for sample in range(NUM_SAMPLES)] for row in range(len(PROMPTS))]
    sent = actor.put(slot, prompts=PROMPTS, seeds=seeds)
    generated = actor.command(
        actor.service.Generate, actor_pb2.GenerateRequest(slot=slot, sampling=SAMPLING), base, "generate-1"
    )
    rows = actor.get(slot, "prompts", "responses", "rollout_log_probs")
    critic.put(slot, prompts=rows["prompts"], responses=rows["responses"])
    actor.command(actor.service.ComputeLogProbs, actor_pb2.ComputeLogProbsRequest(slot=slot), base, "old-1")
    request = reference_pb2.ComputeRefLogProbsRequest(slot=slot)
    actor.command(actor.reference.ComputeRefLogProbs, request, base, "ref-1")
    critic.command(critic.service.ComputeValues, critic_pb2.ComputeValuesRequest(slot=slot), base, "values-1")
    rows |= actor.get(slot, "old_log_probs", "ref_log_probs") | critic.get(slot, "values")

    rewards = [[0.0] * (len(row) - 1) + [sum(token % 2 for token in row) / len(row)] for row in rows["responses"]]
    advantages, returns = advantages_and_returns(rewards, rows["values"])
    actor.put(slot, advantages=advantages)
    critic.put(slot, returns=returns)

    def update_actor() -> worker_pb2.CommandResult:
        return actor.command(actor.service.Update, actor_pb2.ActorUpdateRequest(slot=slot), base, "update-1")

    def update_critic() -> worker_pb2.CommandResult:
        return critic.command(critic.service.Update, critic_pb2.CriticUpdateRequest(slot=slot), base, "update-1")

    with ThreadPoolExecutor(2) as pool:
        updates = [future.result() for future in (pool.submit(update_actor), pool.submit(update_critic))]
    again = [update_actor(), update_critic()]
    return {
        "bytes_sent": sent,
        "policy_version": generated.policy_version,
        "rows": rows,
        "metrics": [dict(reply.metrics) for reply in updates],
        "committed_steps": [reply.committed_step for reply in updates],
        "replayed": [reply.replayed for reply in updates],
        "replayed_again": [reply.replayed for reply in again],
        "metrics_again": [dict(reply.metrics) for reply in again],
    }


def take_over(epoch_file: Path) -> tuple[str, int]:
    """Section "Handshake": the run that the folder belongs to, under the next epoch."""
    before = json.loads(epoch_file.read_text()) if epoch_file.exists() else {"run_id": "a-foreign-run", "epoch": 0}
    mine = {**before, "epoch": before["epoch"] + 1}
    (written := epoch_file.with_suffix(".new")).write_text(json.dumps(mine))
    written.replace(epoch_file)
    return mine["run_id"], mine["epoch"]


def main() -> None:
    found: dict[str, Any] = {"installed": sorted(package.name for package in importlib.metadata.distributions())}
    run_dir = Path(SETTINGS["run_dir"])
    run_id, epoch, nonce = *take_over(run_dir / "controller.epoch"), "nonce-foreign"
    (run_dir / nonce).touch()
    actor, critic = Worker("actor", run_id, epoch), Worker("critic", run_id, epoch)
    workers = [actor, critic]
    slot = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=1)
    header, chunks = encode(slot, {"prompts": PROMPTS})

    found["too_early"] = refusal(lambda: actor.send(header, chunks))
    greetings = [worker.handshake(nonce) for worker in workers]
    found["roles"] = [worker_pb2.Role.Name(greeting.role) for greeting in greetings]
    for worker, greeting in zip(workers, greetings, strict=True):
        initial = worker_pb2.LoadCheckpointRequest(step=0)
        worker.command(worker.worker.LoadCheckpoint, initial, greeting.committed_step, "load-0")
    chunks[0].checksum ^= 1
    found["corrupt"] = refusal(lambda: actor.send(header, chunks))

    def digest(worker: Worker, key: str, base: int) -> str:
        request = worker_pb2.ComputeWeightsDigestRequest()
        return worker.command(worker.worker.ComputeWeightsDigest, request, base, key).weights_sha256

    found["before"] = [digest(worker, "digest-0", 0) for worker in workers]
    found["step"] = step(actor, critic, slot)
    found["after"] = [digest(worker, "digest-1", 1) for worker in workers]
    save = worker_pb2.SaveCheckpointRequest()
    saved = [worker.command(worker.worker.SaveCheckpoint, save, 1, "save-1") for worker in workers]
    found["manifest_sha256"] = [reply.manifest_sha256 for reply in saved]
    manifests = [run_dir / "checkpoints" / "global_step_1" / role / "manifest.json" for role in ("actor", "critic")]
    found["manifest_files"] = [hashlib.sha256(file.read_bytes()).hexdigest() for file in manifests]
    found["manifest_weights"] = [json.loads(file.read_bytes())["weights_sha256"] for file in manifests]
    statuses = [worker.status() for worker in workers]
    found["status"] = [
        [status.committed_step, worker_pb2.WorkerState.Name(status.state), len(status.slots)] for status in statuses
    ]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
