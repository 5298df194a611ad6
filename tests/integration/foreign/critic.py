"""A critic without SplitPPO: a table with one value per last token, behind the protocol of docs/protocol.md.

    python -I critic.py SETTINGS.json     prints its address, then serves until it is ended

SETTINGS: `stubs`, a folder with generated stubs; `run_dir`; `token`. The sections named are those of the page.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import grpc
import numpy as np
import xxhash

SETTINGS = json.loads(Path(sys.argv[1]).read_text())
assert importlib.util.find_spec("splitppo") is None, "the critic must have nothing of ours"
sys.path.insert(0, SETTINGS["stubs"])

from splitppo.v1 import batch_pb2, critic_pb2_grpc, worker_pb2, worker_pb2_grpc  # noqa: E402

LAYOUTS = {
    batch_pb2.DTYPE_INT32: "<i4",
    batch_pb2.DTYPE_INT64: "<i8",
    batch_pb2.DTYPE_FLOAT32: "<f4",
    batch_pb2.DTYPE_UINT8: "u1",
}
VOCABULARY, LEARNING_RATE = 1024, 0.5
Code = grpc.StatusCode


class Refused(Exception):
    """Ends a call with a code and a reason."""

    def __init__(self, code: grpc.StatusCode, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field of less than 2 MiB, as protobuf writes it."""
    sizes = bytes([len(content) & 127 | 128, len(content) >> 7 & 127 | 128, len(content) >> 14])
    return bytes([number << 3 | 2]) + sizes + content


def error_details(refused: Refused) -> bytes:
    """google.rpc.Status with one google.rpc.ErrorInfo; section "Errors"."""
    message = str(refused).encode()
    entry = field(1, b"message") + field(2, message)
    info = field(1, refused.reason.encode()) + field(2, b"splitppo") + field(3, entry)
    detail = field(1, b"type.googleapis.com/google.rpc.ErrorInfo") + field(2, info)
    return bytes([1 << 3, refused.code.value[0]]) + field(2, message) + field(3, detail)


def abort(context: grpc.ServicerContext, refused: Refused) -> NoReturn:
    context.set_trailing_metadata([("grpc-status-details-bin", error_details(refused))])
    context.abort(refused.code, str(refused))


class Critic:
    """The state of one worker. Commands run one at a time; a repeated one waits, and finds its stored result."""

    def __init__(self) -> None:
        self.instance_id = os.urandom(16).hex()
        self.run_dir = Path(SETTINGS["run_dir"])
        self.run_id, self.epoch = "", 0
        self.engine = threading.Lock()
        self.running = ""
        self.start_anew()

    def start_anew(self) -> None:
        self.values = np.zeros(VOCABULARY, "<f4")
        self.committed_step, self.applied_id, self.applied = 0, "", worker_pb2.CommandResult()
        self.saved: dict[str, worker_pb2.CommandResult] = {}
        self.slots: dict[tuple[int, int, int], dict[str, list[np.ndarray[Any, Any]]]] = {}

    def check_caller(self, run_id: str, epoch: int) -> None:
        if not self.epoch:
            raise Refused(Code.FAILED_PRECONDITION, "NOT_INTRODUCED", "call Handshake first")
        if epoch < self.epoch:
            raise Refused(Code.FAILED_PRECONDITION, "STALE_EPOCH", f"epoch {epoch} is over")
        if (run_id, epoch) != (self.run_id, self.epoch):
            raise Refused(Code.FAILED_PRECONDITION, "WRONG_STATE", "call Handshake first")

    def rows(self, slot: batch_pb2.Slot) -> dict[str, list[np.ndarray[Any, Any]]]:
        """Section "Slots": the whole of what was put in parts has each row where its place says."""
        if (key := (slot.kind, slot.step, slot.part)) in self.slots:
            return self.slots[key]
        parts = sorted(other for other in self.slots if other[:2] == key[:2]) if slot.part == 0 else []
        if not parts:
            raise Refused(Code.NOT_FOUND, "NOT_FOUND", f"there is no slot {key}")
        whole = {name: [row for part in parts for row in self.slots[part][name]] for name in self.slots[parts[0]]}
        order = np.argsort(np.concatenate(whole.pop("places")))
        whole = {name: [rows[index] for index in order] for name, rows in whole.items()}
        for part in parts:
            del self.slots[part]
        self.slots[key] = whole
        return whole

    def last_tokens(self, slot: batch_pb2.Slot) -> list[np.ndarray[Any, Any]]:
        """For each response token, the token before it."""
        rows = self.rows(slot)
        pairs = zip(rows["prompts"], rows["responses"], strict=True)
        return [np.concatenate([prompt[-1:], response[:-1]])[: len(response)] for prompt, response in pairs]

    def digest(self) -> str:
        return hashlib.sha256(self.values.tobytes()).hexdigest()

    def compute_values(self, request: Any) -> worker_pb2.CommandResult:
        self.rows(request.slot)["values"] = [self.values[tokens] for tokens in self.last_tokens(request.slot)]
        return worker_pb2.CommandResult(committed_step=self.committed_step)

    def update(self, request: Any) -> worker_pb2.CommandResult:
        tokens = np.concatenate(self.last_tokens(request.slot))
        errors = np.concatenate(self.rows(request.slot)["returns"]) - self.values[tokens]
        counts = np.maximum(np.bincount(tokens, minlength=VOCABULARY), 1)
        self.values += (LEARNING_RATE * np.bincount(tokens, errors, VOCABULARY) / counts).astype("<f4")
        self.committed_step = request.slot.step
        self.slots.clear()
        metrics = {"critic/vf_loss": float(np.mean(errors**2) / 2)}
        self.applied_id = request.header.request_id
        self.applied = worker_pb2.CommandResult(committed_step=self.committed_step, metrics=metrics)
        return self.applied

    def folder(self, step: int) -> Path:
        return self.run_dir / "checkpoints" / f"global_step_{step}" / "critic"

    def save(self, request: Any) -> worker_pb2.CommandResult:
        """Section "A worker of your own": manifest.json is written last."""
        folder = self.folder(self.committed_step)
        folder.mkdir(parents=True, exist_ok=True)
        ledger = json.dumps([self.committed_step, self.applied_id, self.applied.SerializeToString().hex()]).encode()
        contents = {"values": self.values.tobytes(), "ledger.json": ledger}
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        manifest: dict[str, Any] = {
            "version": 1,
            "role": "critic",
            "step": self.committed_step,
            "model": "a table",
            "files": {n: {"sha256": hashlib.sha256(c).hexdigest(), "size": len(c)} for n, c in contents.items()},
            "weights_sha256": self.digest(),
            "ledger_sha256": hashlib.sha256(ledger).hexdigest(),
        }
        manifest["sha256"] = hashlib.sha256(canonical(manifest)).hexdigest()
        (folder / "manifest.json").write_bytes(canonical(manifest))
        digest = hashlib.sha256(canonical(manifest)).hexdigest()
        result = worker_pb2.CommandResult(committed_step=self.committed_step, manifest_sha256=digest)
        self.saved = {request.header.request_id: result}
        return result

    def load(self, request: Any) -> worker_pb2.CommandResult:
        if not request.step:
            self.start_anew()
            return worker_pb2.CommandResult()
        folder = self.folder(request.step)
        files = json.loads((folder / "manifest.json").read_bytes())["files"]
        for name, expected in files.items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected["sha256"]:
                raise Refused(Code.DATA_LOSS, "DATA_LOSS", f"{folder / name} is damaged")
        self.start_anew()
        self.values = np.frombuffer((folder / "values").read_bytes(), "<f4").copy()
        self.committed_step, self.applied_id, applied = json.loads((folder / "ledger.json").read_bytes())
        self.applied = worker_pb2.CommandResult.FromString(bytes.fromhex(applied))
        return worker_pb2.CommandResult(committed_step=request.step, weights_sha256=self.digest())

    def compute_digest(self, _: Any) -> worker_pb2.CommandResult:
        return worker_pb2.CommandResult(committed_step=self.committed_step, weights_sha256=self.digest())

    def run(self, method: str, work: Callable[[Any], worker_pb2.CommandResult], request: Any) -> Any:
        """Section "Commands": stored results first, then the step, then the work."""
        header = request.header
        with self.engine:
            self.check_caller(header.run_id, header.epoch)
            if method == "Update" and header.request_id == self.applied_id:
                result = worker_pb2.CommandResult(replayed=True)
                result.MergeFrom(self.applied)
                return result
            if method == "SaveCheckpoint" and header.request_id in self.saved:
                return self.saved[header.request_id]
            if header.base_step != self.committed_step:
                raise Refused(Code.FAILED_PRECONDITION, "WRONG_STEP", f"the committed step is {self.committed_step}")
            started_ns, self.running = time.time_ns(), method
            try:
                result = work(request)
            finally:
                self.running = ""
            times = worker_pb2.EngineTime(started_unix_ns=started_ns, finished_unix_ns=time.time_ns())
            result.engine_time.CopyFrom(times)
            return result


def canonical(content: dict[str, Any]) -> bytes:
    return f"{json.dumps(content, indent=1, sort_keys=True)}\n".encode()


class Service(worker_pb2_grpc.WorkerServiceServicer):
    """WorkerService, but for the calls that a worker may lack, and CriticService."""

    def __init__(self, critic: Critic) -> None:
        self.critic = critic
        commands = {
            "SaveCheckpoint": critic.save,
            "LoadCheckpoint": critic.load,
            "ComputeWeightsDigest": critic.compute_digest,
            "ComputeValues": critic.compute_values,
            "Update": critic.update,
        }
        for method, work in commands.items():
            setattr(self, method, self.command(method, work))

    def command(self, method: str, work: Any) -> Callable[..., Iterator[worker_pb2.CommandEvent]]:
        def serve(request: Any, context: grpc.ServicerContext) -> Iterator[worker_pb2.CommandEvent]:
            try:
                result = self.critic.run(method, work, request)
            except Refused as refused:
                abort(context, refused)
            yield worker_pb2.CommandEvent(progress=worker_pb2.Progress(done=1, total=1, phase=method))
            yield worker_pb2.CommandEvent(result=result)

        return serve

    def Handshake(self, request: Any, context: Any) -> worker_pb2.HandshakeResponse:
        critic = self.critic
        if request.protocol_version != 1 or not (critic.run_dir / request.nonce).is_file():
            abort(context, Refused(Code.FAILED_PRECONDITION, "WRONG_STATE", "another protocol, or another run folder"))
        if request.epoch < critic.epoch:
            abort(context, Refused(Code.FAILED_PRECONDITION, "STALE_EPOCH", f"epoch {request.epoch} is over"))
        critic.run_id, critic.epoch = request.run_id, request.epoch
        return worker_pb2.HandshakeResponse(
            protocol_version=1,
            role=worker_pb2.ROLE_CRITIC,
            world_size=1,
            instance_id=critic.instance_id,
            committed_step=critic.committed_step,
            config_digest=request.config_digest,
            processes=[worker_pb2.Process(rank=0, pid=os.getpid(), host="localhost")],
            unix_ns=time.time_ns(),
            num_parameters=VOCABULARY,
        )

    def GetStatus(self, _: Any, __: Any) -> worker_pb2.GetStatusResponse:
        critic = self.critic
        return worker_pb2.GetStatusResponse(
            role=worker_pb2.ROLE_CRITIC,
            state=worker_pb2.WORKER_STATE_BUSY if critic.running else worker_pb2.WORKER_STATE_IDLE,
            instance_id=critic.instance_id,
            committed_step=critic.committed_step,
            epoch=critic.epoch,
            running_method=critic.running,
            slots=[batch_pb2.Slot(kind=kind, step=step, part=part) for kind, step, part in list(critic.slots)],
            protocol_version=1,
        )

    def PutBatch(self, requests: Any, context: Any) -> worker_pb2.PutBatchResponse:
        opening, payload = next(requests).header, b""
        for request in requests:
            if xxhash.xxh3_64_intdigest(request.chunk.payload) != request.chunk.checksum:
                abort(context, Refused(Code.DATA_LOSS, "CORRUPT_BATCH", "a chunk does not have its checksum"))
            payload += request.chunk.payload
        columns, at, slot = {}, 0, opening.batch.slot
        for column in opening.batch.columns:
            values = np.frombuffer(payload, LAYOUTS[column.dtype], sum(column.lengths), at)
            at += values.nbytes
            columns[column.name] = np.split(values, np.cumsum(column.lengths)[:-1])
        with self.critic.engine:
            try:
                self.critic.check_caller(opening.run_id, opening.epoch)
                try:
                    present = self.critic.rows(slot)
                except Refused:
                    present = self.critic.slots.setdefault((slot.kind, slot.step, slot.part), {})
            except Refused as refused:
                abort(context, refused)
            present |= columns
        return worker_pb2.PutBatchResponse(received_bytes=len(payload))

    def GetBatch(self, request: Any, context: Any) -> Iterator[worker_pb2.GetBatchResponse]:
        with self.critic.engine:
            try:
                self.critic.check_caller(request.run_id, request.epoch)
                rows = self.critic.rows(request.slot)["values"]  # all that a critic makes
            except Refused as refused:
                abort(context, refused)
        payload = b"".join(row.astype("<f4").tobytes() for row in rows)
        header = batch_pb2.BatchHeader(slot=request.slot, num_rows=len(rows), total_bytes=len(payload))
        header.columns.add(name="values", dtype=batch_pb2.DTYPE_FLOAT32, lengths=[len(row) for row in rows])
        yield worker_pb2.GetBatchResponse(header=header)
        for at in range(0, len(payload), 1 << 20):
            piece = payload[at : at + (1 << 20)]
            chunk = batch_pb2.BatchChunk(offset=at, payload=piece, checksum=xxhash.xxh3_64_intdigest(piece))
            yield worker_pb2.GetBatchResponse(chunk=chunk)


class Doorkeeper(grpc.ServerInterceptor):
    """Section "Connecting": the token."""

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        if ("authorization", f"Bearer {SETTINGS['token']}") in details.invocation_metadata:
            return continuation(details)
        return grpc.unary_unary_rpc_method_handler(lambda _, context: context.abort(Code.UNAUTHENTICATED, "no token"))


def main() -> None:
    options = [("grpc.max_receive_message_length", 8 << 20), ("grpc.http2.min_recv_ping_interval_without_data_ms", 500)]
    server = grpc.server(ThreadPoolExecutor(16), interceptors=[Doorkeeper()], options=options)
    service = Service(Critic())
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)
    critic_pb2_grpc.add_CriticServiceServicer_to_server(service, server)
    port = server.add_insecure_port(SETTINGS.get("bind", "127.0.0.1:0"))
    server.start()
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
