"""The command line of a service: `--check`, and a port that is taken."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.groups import PROJECT, Group
from tests.integration.shell.conftest import MODULE, write_config


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", MODULE, *arguments],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def test_check_says_what_it_would_be(tmp_path: Path) -> None:
    checked = run("--config", str(write_config(tmp_path, 2)), "--check", "data.train_batch_size=6")
    assert checked.returncode == 0, checked.stderr
    assert "critic: unused, 2 processes on the CPU, listening on 127.0.0.1:0" in checked.stdout
    assert "step: 6 prompts x 1 samples" in checked.stdout
    assert not (tmp_path / "logs").exists()


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        group = Group(MODULE, write_config(tmp_path), tmp_path, "critic", overrides=[f"services.critic.bind={bind}"])
        try:
            assert group.wait_ended(120) != 0
        finally:
            group.stop()
    assert f"error: cannot listen on '{bind}': Address already in use\n" in group.output
