"""Measures the cost of moving a batch: our PutBatch and GetBatch beside memcpy, pickle over TCP and, if installed, Ray.

    python -m benchmarks.transport [--rows 1024] [--tokens 2048] [--repetitions 9]

Client and server are two processes on this machine. Every contender moves the same columns, all take turns within each
repetition, and every received batch is one that can be used (numpy arrays in the receiver's memory). CPU seconds are
those of both processes, threads included.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio
import numpy as np
import uvloop

from controller.workers.clients import Caller, WorkerClient
from splitppo.batch import Batch, Column
from splitppo.columns import spec_of
from splitppo.rpc.channel_options import SERVER_OPTIONS
from splitppo.rpc.codec import encode_messages, receive_batch
from splitppo.v1 import batch_pb2, worker_pb2

MAX_BYTES = 4 << 30
SLOT = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=1)

# (a) What one step puts: the rollouts to the critic, advantages to the actor, returns to the critic.
AS_SENT = (("prompts", "responses"), ("advantages",), ("returns",))
# (b) Every column of a step in one batch, as a system without slots would send it.
LOG_PROBS = ("rollout_log_probs", "old_log_probs", "ref_log_probs")
RAW = (("prompts", "responses", *LOG_PROBS, "values", "advantages", "returns"),)
SHORT_PROMPT_TOKENS = 64


# The server process.


class BatchService:
    """PutBatch and GetBatch as the workers serve them."""

    def __init__(self) -> None:
        self._columns: dict[str, Column] = {}

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Returns the handlers; the codec serialises and parses the messages of the batch streams."""
        put = grpc.stream_unary_rpc_method_handler(
            self.put_batch, response_serializer=worker_pb2.PutBatchResponse.SerializeToString
        )
        get = grpc.unary_stream_rpc_method_handler(
            self.get_batch, request_deserializer=worker_pb2.GetBatchRequest.FromString
        )
        return grpc.method_handlers_generic_handler("splitppo.v1.WorkerService", {"PutBatch": put, "GetBatch": get})

    async def put_batch(self, requests: Any, _: Any) -> worker_pb2.PutBatchResponse:
        _, batch = await receive_batch(requests, MAX_BYTES, lambda header: header.batch)
        self._columns.update(batch.columns)
        return worker_pb2.PutBatchResponse(received_bytes=batch.num_bytes)

    async def get_batch(self, request: worker_pb2.GetBatchRequest, _: Any) -> AsyncIterator[bytes]:
        columns = {name: self._columns[name] for name in request.columns}
        header, chunks = encode_messages(Batch(next(iter(columns.values())).num_rows, columns), request.slot)
        yield worker_pb2.GetBatchResponse(header=header).SerializeToString()
        for chunk in chunks:
            yield chunk


async def serve_grpc() -> None:
    """Serves until stdin ends."""
    server = grpc.aio.server(options=list(SERVER_OPTIONS))
    server.add_generic_rpc_handlers((BatchService().handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(answer_cpu_questions)
    await server.stop(0)


def serve_pickle() -> None:
    """Serves until stdin ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=keep_pickles, args=(listener,), daemon=True).start()
    answer_cpu_questions()


def keep_pickles(listener: socket.socket) -> None:
    """Takes a pickled dict of arrays and acknowledges it, or sends those that are asked for by name."""
    connection, _ = listener.accept()
    kept: dict[str, np.ndarray] = {}
    while True:
        message = pickle.loads(receive_frame(connection))  # noqa: S301 - our own other half
        if isinstance(message, dict):
            kept.update(message)
            send_frame(connection, b"ok")
        else:
            send_frame(connection, pickle.dumps({name: kept[name] for name in message}, protocol=5))


def send_frame(connection: socket.socket, payload: bytes) -> None:
    """Sends a length, then the payload."""
    connection.sendall(struct.pack("<Q", len(payload)))
    connection.sendall(payload)


def receive_frame(connection: socket.socket) -> bytearray:
    """Returns what `send_frame` has sent."""
    (size,) = struct.unpack("<Q", receive_exactly(connection, 8))
    return receive_exactly(connection, size)


def receive_exactly(connection: socket.socket, size: int) -> bytearray:
    """Reads `size` bytes; ends the process when the client is gone."""
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise SystemExit(0)
        view = view[received:]
    return buffer


def answer_cpu_questions() -> None:
    """Writes this process's CPU seconds for every line on stdin; returns when the client is gone."""
    for _ in sys.stdin:
        print(time.process_time(), flush=True)


# The client process.


class ServerProcess:
    """A process that runs one of the servers above."""

    def __init__(self, kind: str) -> None:
        command = [sys.executable, "-m", "benchmarks.transport", "--serve", kind]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions = self._process.stdin
        self._answers = self._process.stdout
        self.port = int(self._answers.readline())

    def cpu_s(self) -> float:
        print("cpu", file=self._questions, flush=True)
        return float(self._answers.readline())

    def close(self) -> None:
        self._questions.close()
        self._process.wait(10)


class Contender(Protocol):
    """A way to move columns to another process and back."""

    name: str

    async def put(self, batch: Batch) -> None: ...
    async def get(self, names: tuple[str, ...]) -> int: ...
    def cpu_s(self) -> float: ...
    async def close(self) -> None: ...


class BenchClient(WorkerClient):
    """A client of the worker part only."""

    role = "worker"


class OverGrpc:
    """PutBatch and GetBatch over gRPC: chunks, checksums, checks."""

    name = "SplitPPO (gRPC)"

    def __init__(self) -> None:
        self._server = ServerProcess("grpc")
        self._client = BenchClient(f"127.0.0.1:{self._server.port}", Caller("bench", 1))

    async def put(self, batch: Batch) -> None:
        await self._client.put_batch(SLOT, batch)

    async def get(self, names: tuple[str, ...]) -> int:
        return (await self._client.get_batch(SLOT, names)).num_bytes

    def cpu_s(self) -> float:
        return time.process_time() + self._server.cpu_s()

    async def close(self) -> None:
        await self._client.close()
        self._server.close()


class PickleOverTcp:
    """A length and a pickle on a plain socket; no checks."""

    name = "pickle over TCP"

    def __init__(self) -> None:
        self._server = ServerProcess("pickle")
        self._connection = socket.create_connection(("127.0.0.1", self._server.port))

    async def put(self, batch: Batch) -> None:
        columns = {name: column.values for name, column in batch.columns.items()}
        send_frame(self._connection, pickle.dumps(columns, protocol=5))
        receive_frame(self._connection)

    async def get(self, names: tuple[str, ...]) -> int:
        send_frame(self._connection, pickle.dumps(names, protocol=5))
        columns = pickle.loads(receive_frame(self._connection))  # noqa: S301 - our own other half
        return sum(values.nbytes for values in columns.values())

    def cpu_s(self) -> float:
        return time.process_time() + self._server.cpu_s()

    async def close(self) -> None:
        self._connection.close()
        self._server.close()


class Memcpy:
    """One copy within this process, the lower bound."""

    name = "memcpy"

    def __init__(self) -> None:
        self._kept: dict[str, np.ndarray] = {}

    async def put(self, batch: Batch) -> None:
        for name, column in batch.columns.items():
            self._kept[name] = column.values.copy()

    async def get(self, names: tuple[str, ...]) -> int:
        return sum(self._kept[name].copy().nbytes for name in names)

    def cpu_s(self) -> float:
        return time.process_time()

    async def close(self) -> None:
        self._kept.clear()


class OverRay:
    """Ray's object store on one machine: shared memory, received without a copy. CPU: the driver's only."""

    name = "Ray object store"

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", object_store_memory=1 << 30)

        class Keeper:
            def __init__(self) -> None:
                self.kept: dict[str, np.ndarray] = {}

            def put(self, columns: dict[str, np.ndarray]) -> None:
                self.kept.update(columns)

            def get(self, names: tuple[str, ...]) -> dict[str, np.ndarray]:
                return {name: self.kept[name] for name in names}

        self._keeper = ray.remote(Keeper).remote()

    async def put(self, batch: Batch) -> None:
        columns = {name: column.values for name, column in batch.columns.items()}
        self._ray.get(self._keeper.put.remote(self._ray.put(columns)))

    async def get(self, names: tuple[str, ...]) -> int:
        return sum(values.nbytes for values in self._ray.get(self._keeper.get.remote(names)).values())

    def cpu_s(self) -> float:
        return time.process_time()

    async def close(self) -> None:
        self._ray.shutdown()


# The measurement.


@dataclass
class Timings:
    """The wall and CPU seconds of the repetitions of one row."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @contextmanager
    def measure(self, contender: Contender) -> Iterator[None]:
        cpu_s = contender.cpu_s()
        start_s = time.perf_counter()
        yield
        self.wall_s.append(time.perf_counter() - start_s)
        self.cpu_s.append(contender.cpu_s() - cpu_s)


def make_columns(num_rows: int, num_tokens: int) -> dict[str, Column]:
    """Returns every column with random values, num_tokens in each row."""
    rng = np.random.default_rng(0)

    def column(name: str, tokens: int) -> Column:
        values = rng.integers(0, 150_000, num_rows * tokens).astype(spec_of(name).dtype)
        return Column(values, np.full(num_rows, tokens, np.int32))

    columns = {name: column(name, num_tokens) for name in RAW[0]}
    columns["short prompts"] = column("prompts", SHORT_PROMPT_TOKENS)
    return columns


def make_batches(columns: dict[str, Column], layout: tuple[tuple[str, ...], ...]) -> list[Batch]:
    """Returns the batches of a layout; prompts are short in the layout that a step sends."""
    named = {**columns, "prompts": columns["short prompts"]} if layout is AS_SENT else columns
    return [Batch(named[names[0]].num_rows, {name: named[name] for name in names}) for names in layout]


def contenders() -> list[Contender]:
    """Returns our own contender, and the others that can run here."""
    found: list[Contender] = [OverGrpc(), PickleOverTcp(), Memcpy()]
    try:
        import ray  # type: ignore[import-not-found]
    except ImportError:
        return found
    return [*found, OverRay(ray)]


async def measure(num_rows: int, num_tokens: int, repetitions: int) -> None:
    """Lets all contenders move everything in turns, and reports."""
    columns = make_columns(num_rows, num_tokens)
    as_sent = make_batches(columns, AS_SENT)
    raw = make_batches(columns, RAW)
    values_bytes = columns["values"].values.nbytes

    async def put(contender: Contender, batches: list[Batch]) -> None:
        for batch in batches:
            await contender.put(batch)

    async def get(contender: Contender) -> None:
        assert await contender.get(("values",)) == values_bytes

    directions: list[tuple[str, int, Callable[[Contender], Awaitable[None]]]] = [
        ("(a) in, as a step sends it", sum(batch.num_bytes for batch in as_sent), lambda c: put(c, as_sent)),
        ("(b) in, raw columns", sum(batch.num_bytes for batch in raw), lambda c: put(c, raw)),
        ("values out", values_bytes, get),
    ]
    racing = contenders()
    timings = {(title, contender.name): Timings() for title, _, _ in directions for contender in racing}
    for repetition in range(repetitions + 1):
        for contender in racing:
            for title, _, move in directions:
                timing = Timings() if repetition == 0 else timings[title, contender.name]  # the first one warms up
                with timing.measure(contender):
                    await move(contender)
    for contender in racing:
        await contender.close()
    report(directions, racing, timings)


def report(directions: Any, racing: list[Contender], timings: dict[tuple[str, str], Timings]) -> None:
    """Prints the medians as a table; the load says how quiet the machine was."""
    print(f"cores: {os.cpu_count()}, load average of the last minute: {os.getloadavg()[0]:.1f}")
    print(f"{'what':30} {'MB':>6}  {'how':18} {'ms':>8} {'min ms':>8} {'CPU ms':>8}")
    for title, num_bytes, _ in directions:
        for contender in racing:
            timing = timings[title, contender.name]
            print(
                f"{title:30} {num_bytes / 1e6:6.1f}  {contender.name:18} {statistics.median(timing.wall_s) * 1e3:8.1f}"
                f" {min(timing.wall_s) * 1e3:8.1f} {statistics.median(timing.cpu_s) * 1e3:8.1f}"
            )


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048, help="per row")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--serve", choices=["grpc", "pickle"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve == "grpc":
        uvloop.run(serve_grpc())
    elif arguments.serve == "pickle":
        serve_pickle()
    else:
        uvloop.run(measure(arguments.rows, arguments.tokens, arguments.repetitions))


if __name__ == "__main__":
    main()
