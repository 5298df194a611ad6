"""A rank that says who it is, and then waits; run by torchrun as `-m tests.integration.runtime.slow_start FOLDER`.

A rank whose folder has a file fail_RANK ends with exit code 1 at once.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    part = folder / f"pid_{rank}.part"
    part.write_text(str(os.getpid()))
    part.replace(folder / f"pid_{rank}")
    for stream in ("stdout", "stderr"):
        getattr(sys, stream).write(f"{stream} of rank {rank}\n")
    while not (folder / f"fail_{rank}").exists():
        time.sleep(0.05)
    sys.exit(1)
