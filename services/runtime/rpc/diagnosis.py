"""The RPCs with which the doctor command examines a worker: ranks, run folder, speed of the connection."""

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.runtime.failures.heartbeat import VitalSign
from services.runtime.rpc.limits import refusing_when
from services.runtime.state.worker import Worker
from splitppo.rpc.credentials import Credentials
from splitppo.rpc.errors import InvalidArgument, LimitExceeded
from splitppo.rpc.wire_format import CHUNK_BYTES, MAX_CHUNK_MESSAGE_BYTES, MAX_MEASURED_BYTES, parse
from splitppo.v1 import worker_pb2

_NONCE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class DiagnosisServicer:
    """The RPCs of WorkerService for the doctor: they examine a worker, measure its connection, and change nothing."""

    def __init__(
        self, worker: Worker, credentials: Credentials, vital_signs: Callable[[], Mapping[int, VitalSign]]
    ) -> None:
        self._worker = worker
        self._vital_signs = vital_signs
        self._certificate_ends_unix_s = 0
        if credentials.identity is not None:
            from splitppo.rpc.certificates import valid_until

            self._certificate_ends_unix_s = int(valid_until(credentials.identity).timestamp())

    async def diagnose(self, request: worker_pb2.DiagnoseRequest, _: Any) -> worker_pb2.DiagnoseResponse:
        """Answers what is known of ranks, devices and run folder, and if the file `nonce` is seen in that folder.

        A group that reads images says how it decodes them, too.
        """
        if request.nonce:
            check_nonce(request.nonce)
        # On another thread: storage that hangs must not delay the answers to other calls.
        response = await asyncio.to_thread(_look_into, self._worker.context.config.run.dir, request.nonce)
        if self._worker.reads_images:
            from splitppo.images.decoder import describe_decoder

            response.image_decoder = await asyncio.to_thread(describe_decoder)
        signs = self._vital_signs()
        for process in self._worker.processes:
            rank = response.ranks.add(process=process)
            if (sign := signs.get(process.rank)) is not None:
                rank.device = sign.device.name
                rank.silent_s = sign.silent_s
                rank.free_bytes = sign.device.free_bytes
                rank.total_bytes = sign.device.total_bytes
        response.certificate_ends_unix_s = self._certificate_ends_unix_s
        return response

    async def measure_upload(self, requests: AsyncIterator[bytes], _: Any) -> worker_pb2.MeasureUploadResponse:
        """Receives bytes that the caller times, and answers how many came; none is kept.

        Raises:
            LimitExceeded: too many bytes, or they took longer than services.max_send_s.
        """
        received_bytes = 0
        max_send_s = self._worker.context.config.services.max_send_s
        late = LimitExceeded(f"the measurement took over {max_send_s:g} s (services.max_send_s)")
        async with refusing_when(asyncio.timeout(max_send_s), late):
            async for message in requests:
                request = parse(message, worker_pb2.MeasureUploadRequest, MAX_CHUNK_MESSAGE_BYTES)
                received_bytes += len(request.payload)
                if received_bytes > MAX_MEASURED_BYTES:
                    raise LimitExceeded(f"a measurement takes at most {MAX_MEASURED_BYTES} bytes")
        return worker_pb2.MeasureUploadResponse(received_bytes=received_bytes)

    async def measure_download(self, request: worker_pb2.MeasureDownloadRequest, _: Any) -> AsyncIterator[bytes]:
        """Streams the requested number of bytes to the doctor, which measures the speed of the connection."""
        if request.num_bytes > MAX_MEASURED_BYTES:
            raise InvalidArgument(f"num_bytes must be at most {MAX_MEASURED_BYTES}, got {request.num_bytes}")
        num_whole, rest = divmod(request.num_bytes, CHUNK_BYTES)
        whole = worker_pb2.MeasureDownloadResponse(payload=bytes(CHUNK_BYTES)).SerializeToString()
        for _number in range(num_whole):
            yield whole
        if rest:
            yield worker_pb2.MeasureDownloadResponse(payload=bytes(rest)).SerializeToString()


def check_nonce(nonce: str) -> None:
    """Raises InvalidArgument unless `nonce` is a valid name of a test file in the run folder (letters, digits, ._-)."""
    if not _NONCE.fullmatch(nonce):
        raise InvalidArgument(f"nonce must be the name of a file in the run folder, got {nonce!r}")


def _look_into(run_dir: Path, nonce: str) -> worker_pb2.DiagnoseResponse:
    """Reports about the run folder: if this worker sees the file `nonce` there, if it may write, free bytes."""
    response = worker_pb2.DiagnoseResponse(run_dir=str(run_dir.absolute()))
    response.sees_nonce = bool(nonce) and (run_dir / nonce).is_file()
    response.is_writable = os.access(run_dir, os.W_OK | os.X_OK)
    with suppress(OSError):  # the folder is not there, as is_writable shows
        response.disk_free_bytes = shutil.disk_usage(run_dir).free
    return response
