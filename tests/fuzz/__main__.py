"""`python -m tests.fuzz [--inputs 50000] [--seed 1]`: fuzzes a real service; `make fuzz N=50000`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.fuzz.fuzzer import BOUNDS, fuzz
from tests.integration.shell.conftest import token_only, toys


def main() -> int:
    """0 if the service stood; else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        starting = toys(Path(folder))
        try:
            toy = next(starting)(**BOUNDS, security=token_only(Path(folder)))
            outcome = fuzz(toy, options.inputs, options.seed)
        finally:
            starting.close()
    sys.stdout.write(f"seed {options.seed}: {outcome}\n")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
