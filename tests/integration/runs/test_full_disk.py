"""A disk that fills during a run costs one sentence; the run then goes on from the earlier checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.disks import fill, mounted
from tests.support.runs import NUM_STEPS, started


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB."""
    with mounted(tmp_path / "disk", "size=32m") as disk:
        yield disk


def test_a_full_disk_costs_no_checkpoint(config: dict[str, Any], small_disk: Path, tmp_path: Path) -> None:
    options = ("checkpoint.save_freq=1", "algorithm.adv_estimator=reinforce_plus_plus")  # without a critic: one group
    with started(config, small_disk / "run", *options, beside=tmp_path) as first:
        first.wait_until(lambda folder: folder.committed_steps, "the first checkpoint")
        filler = fill(small_disk)
        assert first.wait() == 1, first.output
    (sentence,) = first.errors
    assert "No space left on device" in sentence
    last_good = first.folder.checkpoint(first.folder.committed_steps[-1])
    assert f"the last good checkpoint is {last_good}, which is untouched" in sentence
    assert "Traceback" not in first.output, first.output
    assert first.folder.committed_steps
    filler.unlink()
    with started(config, small_disk / "run", *options, beside=tmp_path) as second:
        assert second.complete().steps == list(range(NUM_STEPS + 1))
    assert "resumed after step" in second.output
