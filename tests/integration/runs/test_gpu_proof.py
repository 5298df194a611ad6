"""The GPU proof with tiny shapes on a CPU: every part has its figures; what fails is said, and the rest goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_proof import Case, Measuring, cases_of, how_to_carry, missing_packages, run_part, shown
from tests.support.groups import PROJECT


def proof(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu_proof", *arguments]
    return subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.extended
@pytest.mark.parametrize("parts", [(1, 2, 3), (4,)], ids=str)
def test_every_part_has_figures_and_a_table(tmp_path: Path, parts: Sequence[int]) -> None:
    done = proof("--tiny", "--json", str(tmp_path / "proof.json"), "--part", *map(str, parts))
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "proof.json").read_text())
    assert content["machine"]["device"] == "CPU"
    for part in parts:
        cases = {case["name"]: case["values"] for case in content["parts"][str(part)]}
        assert list(cases) == [case.name for case in cases_of(part, tiny=True)]
        assert all(cases.values())
        assert f"(part {part}, " in done.stdout
        assert f"part {part}, {next(iter(cases))}: " in done.stderr
        if part == 2:
            learn = {name: values["trained M"] for name, values in cases.items()}
            assert all(values["tokens/s"] > 0 and values["estimate GiB"] > 0 for values in cases.values())
            assert 0 < learn["tiny lora"] < learn["tiny full"]
        if part == 3:
            assert cases["tiny full, deterministic algorithms"]["same weights twice"]
            assert 0 < cases["tiny lora, 128 tokens"]["attention share"] < 1
            assert 0 < cases["tiny lora, 128 tokens"]["head share"] < 1
        if part == 4:
            assert cases["tiny lora"]["same weights"]
            assert f"| tiny lora | {shown(cases['tiny lora']['step s'])} |" in done.stdout


def results_of(folder: Path, *cases: Case, limit_s: float) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    with closing(Measuring(folder, tiny=True)) as measuring:
        run_part(cases, limit_s, measuring, lambda case, result: results.__setitem__(case.name, result))
    return results


@pytest.mark.extended
def test_what_fails_is_said_and_the_rest_goes_on(tmp_path: Path) -> None:
    mistake = Case("mistake", "update", {"size": "no such size", "mode": "full", "keys": {}})
    results = results_of(tmp_path, mistake, Case("machine", "machine"), limit_s=120.0)
    assert results["mistake"] == {"failed": "KeyError: 'no such size'"}
    assert results["machine"]["values"]["device"] == "CPU"


def test_a_part_ends_at_its_limit_and_names_what_it_did_not_reach(tmp_path: Path) -> None:
    results = results_of(tmp_path, Case("one", "machine"), Case("two", "machine"), limit_s=0.2)
    assert results["one"] == {"failed": "stopped, since the time of the part was over"}
    assert results["two"]["failed"].startswith("not run")


def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    done = proof()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1  # noqa: PT018


def test_missing_packages_are_named_with_the_commands_that_bring_them() -> None:
    assert missing_packages() == []
    sentence = how_to_carry(["pydantic>=2.12", "rich>=14"])
    assert "lacks pydantic>=2.12, rich>=14: " in sentence
    assert sentence.count("'pydantic>=2.12' 'rich>=14'") == 2
