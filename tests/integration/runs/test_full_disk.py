"""A disk that runs full in mid-run costs one sentence; the earlier checkpoint stays, and the run goes on from it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs import NUM_STEPS, started


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Takes all room that is left."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
    return filler


def test_a_full_disk_costs_no_checkpoint(config: dict[str, Any], small_disk: Path, tmp_path: Path) -> None:
    with started(config, small_disk / "run", "checkpoint.save_freq=1", beside=tmp_path) as first:
        first.wait_until(lambda folder: folder.committed_steps, "the first checkpoint")
        filler = fill(small_disk)
        assert first.wait() == 1, first.output
    assert "No space left on device" in first.output
    assert "Traceback" not in first.output, first.output
    assert first.folder.committed_steps
    filler.unlink()
    with started(config, small_disk / "run", "checkpoint.save_freq=1", beside=tmp_path) as second:
        assert second.complete().steps == list(range(NUM_STEPS + 1))
    assert "resumed after step" in second.output
