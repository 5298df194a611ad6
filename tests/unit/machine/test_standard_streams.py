"""A process that was started without standard streams."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.groups import PROJECT

PRINTS = """
import sys
from splitppo.machine.standard_streams import open_standard_streams
open_standard_streams()
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2
    print("to standard output")
    sys.stderr.write("to standard error")
    file.write("its own")
sys.exit(3 if sys.stdin.read() == "" else 4)
"""


def started_without(streams: str, *command: str) -> int:
    script = f'exec "$@" {streams}'
    return subprocess.run(["bash", "-c", script, "bash", sys.executable, *command], cwd=PROJECT, check=False).returncode


@pytest.mark.parametrize("streams", ["<&-", "</dev/null >&-", "</dev/null 2>&-", "<&- >&- 2>&-"])
def test_what_is_printed_without_a_stream_is_in_no_file_and_ends_nothing(tmp_path: Path, streams: str) -> None:
    file = tmp_path / "file"
    assert started_without(streams, "-c", PRINTS, str(file)) == 3
    assert file.read_text() == "its own"


@pytest.mark.slow
def test_the_controller_ends_as_it_does_with_them(tmp_path: Path) -> None:
    assert started_without("<&- >&- 2>&-", "-m", "controller", "--config", str(tmp_path / "none.yaml")) == 2
