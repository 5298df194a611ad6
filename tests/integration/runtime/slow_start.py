"""A rank that says who it is, and then waits; run by torchrun as `-m tests.integration.runtime.slow_start FOLDER`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    file = Path(sys.argv[1]) / f"pid_{os.environ['RANK']}"
    file.with_suffix(".part").write_text(str(os.getpid()))
    file.with_suffix(".part").replace(file)
    time.sleep(600)
