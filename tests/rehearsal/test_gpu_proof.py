"""The GPU proof on a pretended GPU, with tiny shapes: what will run on the day, with the device on which it will."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_list import quick_cases

PRETENDED = "REHEARSAL_LIBRARY" in os.environ
NOT_ON_A_CPU = "not on a CPU"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not PRETENDED, reason="needs the pretended CUDA device: make rehearse-gpu"),
]


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_the_quick_proof_runs_in_order_and_says_that_its_gpu_is_pretended(tmp_path: Path) -> None:
    arguments = ["--quick", "--tiny", "--skip", "tests", "--json", str(tmp_path / "proof.json")]
    command = [sys.executable, "-m", "benchmarks.gpu_proof", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "proof.json").read_text())
    assert content["machine"]["device"].startswith("pretended by torch on a CPU, as ")
    results = {entry["name"]: entry for entry in content["cases"]}
    assert [*results] == [case.name for case in quick_cases() if case.group != "tests"]

    values = {name: result["values"] for name, result in results.items()}
    assert values["sanitizer/buckets-and-rest"]["passed"] > 0
    assert values["run/0.5B-killed-critic"]["restarts"] == 1
    assert values["run/0.5B-killed-critic"]["actor's peak GiB"] > 0
    in_full = values["update/1.5B-full-checkpointing"]
    of_kernels = {"MFU", "attention share", "head share", "longest kernels"}
    assert {name for name, value in in_full.items() if value == NOT_ON_A_CPU} == of_kernels
    offloaded = values["update/1.5B-full-all-offloaded"]
    assert 0 < offloaded["between updates GiB"] < 0.1 * in_full["between updates GiB"]
    shares = {name: of_case["peak/estimate"] for name, of_case in values.items() if "peak/estimate" in of_case}
    assert len(shares) == 6
    assert {name: share for name, share in shares.items() if not 0.7 < share < 1.15} == {}
    assert values["repeat/1.5B-default"]["same weights twice"]
