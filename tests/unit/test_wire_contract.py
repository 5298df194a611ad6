"""`make check` compares proto/ with the contract in proto/baseline.binpb."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.buf import BUF, needs_buf

ROOT = Path(__file__).parents[2]


def breaking(checkout: Path) -> subprocess.CompletedProcess[str]:
    command = [BUF, "breaking", "--against", str(ROOT / "proto" / "baseline.binpb")]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of proto/ to be changed."""
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    return tmp_path


def change(checkout: Path, old: str, new: str) -> None:
    file = checkout / "proto" / "splitppo" / "v1" / "batch.proto"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@needs_buf
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("uint64 offset = 1;", "uint64 offset = 9;"),
        ("uint64 offset = 1;", "uint64 position = 1;"),
        ("fixed64 checksum = 3;", "uint64 checksum = 3;"),
        ("  bytes payload = 2;\n", ""),
        ("  DTYPE_UINT8 = 4;\n", ""),
    ],
)
def test_a_change_that_breaks_clients_is_found(checkout: Path, old: str, new: str) -> None:
    change(checkout, old, new)
    found = breaking(checkout)
    assert found.returncode != 0
    assert "batch.proto" in found.stdout


@needs_buf
def test_an_addition_is_free(checkout: Path) -> None:
    change(checkout, "  bytes payload = 2;\n", "  bytes payload = 2;\n  bool is_last = 4;\n")
    assert breaking(checkout).returncode == 0


def test_make_check_lints_the_contract_and_compares_it() -> None:
    command = ["make", "--dry-run", "--no-print-directory", "check", "VENV=there"]
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    for what in ("lint", "format --diff --exit-code", "breaking --against proto/baseline.binpb"):
        assert f"there/bin/buf {what}" in lines
