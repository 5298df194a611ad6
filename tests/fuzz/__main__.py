"""`python -m tests.fuzz [--inputs 50000] [--seed 1]`: fuzzes every role with the same share; `make fuzz N=50000`.

Without --role, as many replies as inputs of a role go to a group whose conversations wait.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import get_args

from tests.fuzz.commands import Role
from tests.fuzz.fuzzer import fuzz
from tests.fuzz.replies import fuzz_replies
from tests.fuzz.services import running


def main() -> int:
    """0 if all services stood; else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--role", choices=get_args(Role), action="append", help="default: all")
    options = parser.parse_args()
    roles = options.role or get_args(Role)
    num_failures = 0
    for role in roles:
        with tempfile.TemporaryDirectory() as folder, running(role, Path(folder)) as service:
            outcome = fuzz(service, options.inputs // len(roles), options.seed)
        sys.stdout.write(f"{role}, seed {options.seed}: {outcome}\n")
        num_failures += len(outcome.failures)
    if not options.role:
        with tempfile.TemporaryDirectory() as folder:
            failures = fuzz_replies(Path(folder), options.inputs // len(roles), options.seed)
        sys.stdout.write("\n".join(["replies, FAILED:", *failures[:20]] if failures else ["replies: refused"]) + "\n")
        num_failures += len(failures)
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
