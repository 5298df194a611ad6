"""A worker's answer to a request for its diagnosis, without a server."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.runtime.failures.device import DeviceState
from services.runtime.failures.heartbeat import VitalSign
from services.runtime.rpc.diagnosis import DiagnosisServicer
from splitppo.images.decoder import describe_decoder
from splitppo.rpc.certificates import load_identity
from splitppo.rpc.credentials import PLAINTEXT, Credentials
from splitppo.rpc.errors import InvalidArgument, LimitExceeded
from splitppo.rpc.wire_format import MAX_MEASURED_BYTES
from splitppo.v1 import worker_pb2
from tests.support.certificates import secure
from tests.unit.runtime.rpc.test_servicer import make_worker

MIB = 1 << 20


def servicer(run_dir: Path, *, credentials: Credentials = PLAINTEXT, signs: Any = dict) -> DiagnosisServicer:
    worker = make_worker(run_dir)
    worker.processes = [worker_pb2.Process(rank=rank, pid=100 + rank, host="gpu-one") for rank in range(2)]
    return DiagnosisServicer(worker, credentials, signs)


async def diagnose(asked: DiagnosisServicer, nonce: str = "") -> worker_pb2.DiagnoseResponse:
    return await asked.diagnose(worker_pb2.DiagnoseRequest(nonce=nonce), None)


async def test_every_rank_is_there_with_its_device_and_its_silence_also_one_that_was_never_heard_of(
    tmp_path: Path,
) -> None:
    signs = {0: VitalSign(DeviceState("H200", 7, 9), 0.5)}
    first, second = (await diagnose(servicer(tmp_path, signs=lambda: signs))).ranks
    assert (first.process.pid, first.device, first.free_bytes, first.total_bytes) == (100, "H200", 7, 9)
    assert first.silent_s == 0.5
    assert (second.process.host, second.device, second.total_bytes) == ("gpu-one", "", 0)


async def test_a_group_that_reads_images_says_how_it_decodes_them(tmp_path: Path) -> None:
    worker = make_worker(tmp_path)
    asked = DiagnosisServicer(worker, PLAINTEXT, dict)
    assert (await diagnose(asked)).image_decoder == ""
    worker.reads_images = True
    assert (await diagnose(asked)).image_decoder == describe_decoder()
    assert re.fullmatch(r"Pillow [0-9.]+, [0-9a-f]{16}", describe_decoder())


async def test_a_file_is_seen_where_it_is_in_the_run_folder(tmp_path: Path) -> None:
    asked = servicer(tmp_path)
    assert not (await diagnose(asked, "nonce-1")).sees_nonce
    (tmp_path / "nonce-1").touch()
    seen = await diagnose(asked, "nonce-1")
    assert (seen.sees_nonce, seen.is_writable, seen.run_dir) == (True, True, str(tmp_path))
    assert abs(seen.disk_free_bytes - shutil.disk_usage(tmp_path).free) < 1 << 30
    assert not (await diagnose(asked)).sees_nonce


async def test_a_run_folder_that_is_gone_is_said_and_breaks_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    asked = servicer(tmp_path / "run")
    (tmp_path / "run").rmdir()
    answer = await diagnose(asked, "nonce-1")
    assert (answer.sees_nonce, answer.is_writable, answer.disk_free_bytes) == (False, False, 0)


@pytest.mark.parametrize("nonce", ["../config.yaml", "/etc/passwd", "..", "a\nb", "x" * 200])
async def test_a_nonce_is_a_plain_name(tmp_path: Path, nonce: str) -> None:
    with pytest.raises(InvalidArgument, match="nonce must be the name of a file"):
        await diagnose(servicer(tmp_path), nonce)


async def test_the_end_of_the_certificate_is_told(tmp_path: Path) -> None:
    secure(tmp_path)
    identity = load_identity(tmp_path / "ca.pem", tmp_path / "actor.pem", tmp_path / "actor.key")
    ends = (await diagnose(servicer(tmp_path, credentials=Credentials(identity)))).certificate_ends_unix_s
    assert 89 < (ends - (tmp_path / "actor.pem").stat().st_mtime) / 86400 < 91
    assert (await diagnose(servicer(tmp_path))).certificate_ends_unix_s == 0


async def upload(asked: DiagnosisServicer, *messages: bytes) -> int:
    async def stream() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    return (await asked.measure_upload(stream(), None)).received_bytes


def payload(num_bytes: int) -> bytes:
    return worker_pb2.MeasureUploadRequest(payload=bytes(num_bytes)).SerializeToString()


async def test_an_upload_is_counted_and_bounded(tmp_path: Path) -> None:
    asked, most = servicer(tmp_path), [payload(MIB)] * (MAX_MEASURED_BYTES // MIB)
    assert await upload(asked) == 0
    assert await upload(asked, payload(MIB), payload(3)) == MIB + 3
    assert await upload(asked, *most) == MAX_MEASURED_BYTES
    with pytest.raises(LimitExceeded, match="at most"):
        await upload(asked, *most, payload(1))
    with pytest.raises(LimitExceeded, match="over the limit"):
        await upload(asked, payload(2 * MIB))
    with pytest.raises(InvalidArgument, match="MeasureUploadRequest"):
        await upload(asked, b"\xff")


@pytest.mark.parametrize("num_bytes", [0, 1, MIB, 2 * MIB + 5])
async def test_a_download_has_the_bytes_that_are_asked_for(tmp_path: Path, num_bytes: int) -> None:
    request = worker_pb2.MeasureDownloadRequest(num_bytes=num_bytes)
    messages = [message async for message in servicer(tmp_path).measure_download(request, None)]
    sizes = [len(worker_pb2.MeasureDownloadResponse.FromString(message).payload) for message in messages]
    assert sum(sizes) == num_bytes
    assert all(0 < size <= MIB for size in sizes)


async def test_a_download_is_bounded(tmp_path: Path) -> None:
    request = worker_pb2.MeasureDownloadRequest(num_bytes=MAX_MEASURED_BYTES + 1)
    with pytest.raises(InvalidArgument, match="num_bytes must be at most"):
        await anext(servicer(tmp_path).measure_download(request, None))
