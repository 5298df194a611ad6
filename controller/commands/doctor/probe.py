"""Asks one worker group for its state within seconds, also if the group is faulty; does not disturb its work."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from controller.commands.doctor.facts import Connection, Diagnosis, FailureCode, GroupFacts, Status
from splitppo.rpc.channel_options import answering_within
from splitppo.rpc.connection_failures import connection_hint, handshake_failure, why_unreachable
from splitppo.rpc.credentials import Credentials
from splitppo.rpc.errors import error_from_rpc
from splitppo.rpc.wire_format import CHUNK_BYTES, MAX_MEASURED_BYTES
from splitppo.v1 import worker_pb2, worker_pb2_grpc

# The longest wait for an answer, and for all measurements with the wait for other groups.
_ANSWER_S = 3.0
_MEASURE_S = 6.0
# The time for round trips, and for bytes in each direction.
_ROUND_TRIPS_S = 0.2
_MAX_ROUND_TRIPS = 100
_SEND_S = 0.2
_UPLOAD_BYTES = CHUNK_BYTES // 4  # a message; small, so that a slow connection is left soon


async def examine(group: GroupFacts, credentials: Credentials, nonce: str, turn: asyncio.Lock) -> None:
    """Asks a worker group for state, diagnosis and speed, and fills in the facts about it.

    A group that does not answer raises nothing: its `failure` is set.

    Args:
        group: the facts to fill in.
        credentials: those of the controller.
        nonce: the name of a file in the run folder that the group must see; "" without such a file.
        turn: the lock that is held while speed is measured, so that groups are measured one after the other.
    """
    channel = credentials.channel(group.address, options=answering_within(_ANSWER_S))
    worker: Any = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
    try:
        group.status = Status.of(await worker.GetStatus(worker_pb2.GetStatusRequest(), timeout=_ANSWER_S))
        await _diagnose(group, worker, nonce)
        with suppress(TimeoutError):  # measurements that take too long stay None
            async with asyncio.timeout(_MEASURE_S), turn:
                connection = group.connection = Connection.of(*await _round_trips(worker))
                if group.diagnosis is not None:
                    connection = group.connection = replace(connection, upload_bytes_per_s=await _upload(worker))
                    group.connection = replace(connection, download_bytes_per_s=await _download(worker))
    except grpc.RpcError as error:
        group.failure_code, group.failure = _explain(error, has_tls=credentials.identity is not None)
    finally:
        await channel.close(None)


async def _diagnose(group: GroupFacts, worker: Any, nonce: str) -> None:
    """Asks a worker for a diagnosis of its ranks and storage; workers of other software may not support this RPC."""
    try:
        answer = await worker.Diagnose(worker_pb2.DiagnoseRequest(nonce=nonce), timeout=_ANSWER_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            group.failure_code = "storage"
            group.failure = f"it does not say within {_ANSWER_S:g} s what it sees there"
        elif error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise
    else:
        group.diagnosis = Diagnosis.of(answer, asked_for_nonce=bool(nonce))


async def _round_trips(worker: Any) -> tuple[list[float], float | None]:
    """Measures round trips to a worker: returns (seconds of each, the worker's clock minus this clock, in seconds).

    The offset of the clock is taken from the fastest round trip; None if the worker does not send its time.
    """
    round_trips_s: list[float] = []
    clock_offset_s = None
    deadline = time.perf_counter() + _ROUND_TRIPS_S
    while not round_trips_s or (len(round_trips_s) < _MAX_ROUND_TRIPS and time.perf_counter() < deadline):
        began = time.time()
        began_s = time.perf_counter()
        status = await worker.GetStatus(worker_pb2.GetStatusRequest(), timeout=_ANSWER_S)
        took_s = time.perf_counter() - began_s
        if status.unix_ns and took_s < min(round_trips_s, default=took_s + 1.0):
            clock_offset_s = status.unix_ns / 1e9 - (began + took_s / 2)
        round_trips_s.append(took_s)
    return round_trips_s, clock_offset_s


async def _upload(worker: Any) -> float | None:
    """Measures the bytes per second to the worker; None if the call fails, for instance because of its deadline."""
    message = worker_pb2.MeasureUploadRequest(payload=bytes(_UPLOAD_BYTES))
    began_s = time.perf_counter()

    async def messages() -> AsyncIterator[worker_pb2.MeasureUploadRequest]:
        for _ in range(MAX_MEASURED_BYTES // _UPLOAD_BYTES):
            yield message
            if time.perf_counter() - began_s > _SEND_S:
                return

    try:
        answer = await worker.MeasureUpload(messages(), timeout=_ANSWER_S)
    except grpc.RpcError:
        return None
    return float(answer.received_bytes) / (time.perf_counter() - began_s)


async def _download(worker: Any) -> float | None:
    """Measures the bytes per second from the worker; None if not even one message arrives in time."""
    num_bytes = 0
    began_s = time.perf_counter()
    took_s = 0.0
    call = worker.MeasureDownload(worker_pb2.MeasureDownloadRequest(num_bytes=MAX_MEASURED_BYTES), timeout=_ANSWER_S)
    try:
        async for message in call:
            num_bytes += len(message.payload)
            took_s = time.perf_counter() - began_s
            if took_s > _SEND_S:
                break
    except grpc.RpcError:
        pass  # earlier messages count
    finally:
        call.cancel()
    return num_bytes / took_s if num_bytes else None


def _explain(error: grpc.RpcError, *, has_tls: bool) -> tuple[FailureCode, str]:
    """Converts a failed gRPC call to a group into (code of the fault, end of the sentence about the fault)."""
    code = error.code()
    details = error.details() or ""
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return "token", error_from_rpc(error).message
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "not_a_worker", "what listens there is no SplitPPO worker"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "silent", f"no answer within {_ANSWER_S:g} s"
    if code is not grpc.StatusCode.UNAVAILABLE:
        return "failed", error_from_rpc(error).message
    reason = why_unreachable(details, _ANSWER_S, with_tls=has_tls)
    if handshake_failure(details) or connection_hint(details):
        return "tls", reason
    kinds: dict[str, FailureCode] = {"nothing listens": "down", "cannot be resolved": "address"}
    return next((kind for words, kind in kinds.items() if words in reason), "silent"), reason
