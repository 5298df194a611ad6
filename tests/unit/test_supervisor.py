"""deploy/hosts: processes that are started again, and processes that are not; a script replaces `python`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.groups import wait_until

HOSTS = Path(__file__).parents[2] / "deploy" / "hosts"
# Takes the first line of the file `codes` away and exits with it; `wait` waits for SIGTERM and drains.
PYTHON = """#!/bin/sh
echo "$@" >> calls
code=$(head -n 1 codes)
sed -i 1d codes
if [ "$code" = wait ]; then
  trap 'sleep 0.2; exit 143' TERM
  touch waits
  while true; do sleep 0.05; done
fi
exit "$code"
"""


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in (("python", PYTHON), ("sleep", '#!/bin/sh\n[ "$1" = 2 ] || exec /bin/sleep "$1"\n')):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    return folder


def supervise(folder: Path, bin_folder: Path, *codes: str) -> subprocess.Popen[str]:
    (folder / "codes").write_text("\n".join(codes) + "\n")
    return subprocess.Popen(
        [HOSTS / "supervise.sh", "actor", "--config", "my.yaml", "--node-rank", "1"],
        cwd=folder,
        env={**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("codes", "num_starts", "exit_code"),
    [
        pytest.param(["0"], 1, 0, id="drained"),
        pytest.param(["2"], 1, 2, id="input refused"),
        pytest.param(["1", "137", "0"], 3, 0, id="failed, killed"),
        pytest.param(["1", "2", "0"], 3, 0, id="refused, what has worked before"),
    ],
)
def test_ranks_are_started_again_after_errors(
    tmp_path: Path, bin_folder: Path, codes: list[str], num_starts: int, exit_code: int
) -> None:
    supervisor = supervise(tmp_path, bin_folder, *codes)
    _, said = supervisor.communicate(timeout=30)
    assert supervisor.returncode == exit_code
    assert (tmp_path / "calls").read_text() == "-m services.actor --config my.yaml --node-rank 1\n" * num_starts
    assert said.count("they start again in 2 s") == num_starts - 1


def test_sigterm_drains_the_ranks_and_starts_nothing(tmp_path: Path, bin_folder: Path) -> None:
    supervisor = supervise(tmp_path, bin_folder, "wait", "0")
    wait_until((tmp_path / "waits").exists, what="the ranks run")
    supervisor.send_signal(signal.SIGTERM)
    supervisor.communicate(timeout=30)
    assert supervisor.returncode == 143
    assert (tmp_path / "codes").read_text() == "0\n", "they were started once"


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = (HOSTS / "splitppo@.service").read_text()
    assert unit.count(f"ExecStart=/opt/splitppo/{(HOSTS / 'supervise.sh').relative_to(HOSTS.parents[1])} %i ") == 1
    if (verify := shutil.which("systemd-analyze")) is None:
        return
    here = tmp_path / "splitppo@.service"
    here.write_text(unit.replace("/opt/splitppo", str(HOSTS.parents[1])))
    verified = subprocess.run([verify, "verify", "--man=no", here], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
