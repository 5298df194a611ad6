"""What trackers and rewards use of the run folder needs the standard library alone."""

from __future__ import annotations

import subprocess
import sys

SOURCE = """
import sys
from splitppo.run_folder import append_log, columns, contents, end_reason, epoch, events, live, logs, processes
from splitppo.run_folder import rollout_lines, rollout_store, samples, step_file
print(*sorted({"numpy", "pyarrow", "pydantic", "yaml", "grpc"}.intersection(sys.modules)))
"""


def test_files_of_a_run_are_written_and_read_without_packages() -> None:
    done = subprocess.run([sys.executable, "-c", SOURCE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
