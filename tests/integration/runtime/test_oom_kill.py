"""A rank that the kernel kills for lack of memory is reported as such, with its size; other kills are not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cgroups import memory_limit

ROOT = Path(__file__).parents[3]
LIMIT_BYTES = 768 << 20
TAKE_ALL = "blocks = []\nwhile True:\n    blocks.append(bytearray(b'x') * (16 << 20))"
KILL_ITSELF = "import os\nos.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (
            TAKE_ALL,
            r"error: rank 0 was ended by SIGKILL, by the kernel for want of memory:"
            r" it had 0\.[4-7] GiB at most, 0\.[0-7] of 0\.8 GiB were free\n",
        ),
        (KILL_ITSELF, r"error: rank 0 was ended by SIGKILL\n"),
    ],
    ids=["the kernel", "somebody"],
)
def test_who_has_killed_a_rank_is_said(tmp_path: Path, program: str, sentence: str) -> None:
    (tmp_path / "rank.py").write_text(program)
    group = [
        sys.executable,
        "-m",
        "services.runtime.group.torchrun",
        "--nproc-per-node",
        "1",
        str(tmp_path / "rank.py"),
    ]
    with memory_limit(LIMIT_BYTES) as pids:
        ended = subprocess.run(
            ["sh", "-c", f'echo $$ > {pids}; exec "$@"', "sh", *group],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert ended.returncode == 137
    assert re.fullmatch(sentence, ended.stderr)
