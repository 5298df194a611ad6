"""Commands that are printed for a user can be pasted, also into a shell that has not entered the environment."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from splitppo.our_commands import our_command, our_python
from tests.support.groups import PROJECT

WITHOUT_ENVIRONMENT = {"PATH": "/nowhere"}


@pytest.mark.parametrize("module", ["viewer", "controller"])
def test_a_command_runs_in_a_shell_without_the_environment(module: str) -> None:
    command = ["/bin/sh", "-c", our_command(module, "--help")]
    done = subprocess.run(command, cwd=PROJECT, env=WITHOUT_ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage" in done.stdout


def test_what_a_shell_would_read_otherwise_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/my python/bin/python")
    words = shlex.split(our_command("viewer", Path("runs/a b; c"), "$HOME"))
    assert words == ["/opt/my python/bin/python", "-m", "viewer", "runs/a b; c", "$HOME"]
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    monkeypatch.chdir(tmp_path)
    assert our_python() == ".venv/bin/python"


@pytest.mark.parametrize(
    ("hidden", "call", "extra"),
    [
        ("omegaconf", "controller.__main__ import main; sys.exit(main(['from-verl', 'script.sh']))", "from-verl"),
        ("uvicorn", "viewer.__main__ import main", "viewer"),
    ],
)
def test_a_command_without_a_package_that_few_need_names_the_extra_that_has_it(
    hidden: str, call: str, extra: str
) -> None:
    code = f"import sys; sys.modules[{hidden!r}] = None; from {call}"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    [sentence] = done.stderr.splitlines()
    assert sentence.startswith(f"error: {sys.executable} does not have the package {hidden}: ")
    assert sentence.endswith(f" -m pip install 'splitppo[{extra}]'")


def test_the_viewer_without_its_packages_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("import no_such_package")
    command = [sys.executable, "-m", "viewer", "runs"]
    done = subprocess.run(
        command, cwd=PROJECT, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    [sentence] = done.stderr.splitlines()
    assert (
        "does not have the package no_such_package: `make setup` makes an environment, `. .venv/bin/activate`"
        in sentence
    )
