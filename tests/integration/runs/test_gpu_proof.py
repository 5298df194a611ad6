"""The GPU proof with tiny shapes on a CPU: every case that a CPU can have is run, and the others say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_list import all_cases, chosen, quick_cases
from benchmarks.gpu_page import shown
from tests.support.groups import PROJECT

NOT_ON_A_CPU = "not on a CPU"


def proof(*arguments: str, python: tuple[str, ...] = (sys.executable,)) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*python, "-m", "benchmarks.gpu_proof", *arguments]
    return subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)


def results_of(folder: Path, *arguments: str) -> dict[str, Mapping[str, Any]]:
    """The results by name, after all cases have run and none has failed."""
    done = proof("--tiny", "--json", str(folder / "proof.json"), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((folder / "proof.json").read_text())
    assert content["machine"]["device"] == "CPU"
    assert content["not reached"] == []
    assert done.stdout == (folder / "proof.md").read_text() + "\n"
    return {entry["name"]: entry for entry in content["cases"]}


@pytest.mark.extended
def test_the_quick_proof_runs_in_order_and_says_what_a_cpu_cannot_have(tmp_path: Path) -> None:
    results = results_of(tmp_path, "--quick")
    assert [*results] == [case.name for case in quick_cases()]
    without = {name for name, result in results.items() if result.get("skipped") == NOT_ON_A_CPU}
    assert without == {"tests/gpu", "sanitizer/buckets-and-rest"}
    assert all(result["values"] for name, result in results.items() if name not in without)

    in_full = results["update/1.5B-full-checkpointing"]["values"]
    of_a_gpu = {"MFU", "peak GiB", "peak/estimate", "between updates GiB", "longest kernels"}
    assert {name for name, value in in_full.items() if value == NOT_ON_A_CPU} == of_a_gpu
    assert in_full["tokens/s"] > 0
    assert 0 < in_full["attention share"] < 1
    assert 0 < in_full["head share"] < 1
    assert 0 < results["row/7B-lora-32k"]["values"]["trained M"] < in_full["trained M"]

    killed = results["run/0.5B-killed-critic"]["values"]
    assert (killed["steps"], killed["restarts"]) == (3, 1)
    assert killed["from a kill to the next call s"] > 0
    assert f"| step s | {shown(killed['step s'])} |" in (tmp_path / "proof.md").read_text()
    assert results["repeat/1.5B-deterministic"]["values"]["same weights twice"]


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kinds", "left_out"),
    [(["update", "row"], ["*-compiled"]), (["update/0.5B-full-compiled"], []), (["run"], [])],
    ids=["updates and rows", "compiled", "runs"],
)
def test_the_other_cases_have_figures(tmp_path: Path, kinds: list[str], left_out: list[str]) -> None:
    quick = [case.name for case in quick_cases() if case.group in ("update", "row", "run")]
    results = results_of(tmp_path, "--only", *kinds, "--skip", *quick, *left_out)
    expected = chosen(all_cases(), kinds, [*quick, *left_out])
    assert [*results] == [case.name for case in expected]
    assert all(result["values"] for result in results.values())
    resumed = [result["values"]["same weights"] for result in results.values() if result["function"] == "resumed_run"]
    assert all(resumed)


def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    done = proof("--quick")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1  # noqa: PT018


def test_the_packages_that_a_bare_python_lacks_are_named_before_any_is_needed() -> None:
    done = proof("--quick", python=(sys.executable, "-S"))
    assert (done.returncode, done.stdout) == (2, "")
    assert " lacks packaging: on a machine with a network run `python3 -m pip download" in done.stderr


def test_the_names_of_the_cases_are_listed_with_their_limits() -> None:
    done = proof("--quick", "--list", "--skip", "basics")
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        case.name for case in quick_cases() if case.group != "basics"
    ]


def test_a_name_that_no_case_has_is_one_sentence() -> None:
    done = proof("--only", "no/such")
    assert done.returncode == 2
    assert done.stderr == "error: no case is named no/such: expected a name that --list shows, a pattern, or a group\n"
