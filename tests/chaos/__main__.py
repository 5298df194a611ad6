"""python -m tests.chaos [--kills N] [--seed S]: random kills; exit 1 unless the run ends like an undisturbed one."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.chaos.harness import Kill, chaos_config, run_chaos
from tests.kill_matrix.harness import undisturbed_digests
from tests.support.runs import Inputs


def main() -> int:
    """One undisturbed run, one with kills, and the report."""
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="how many processes are killed or stopped")
    parser.add_argument("--seed", type=int, default=0, help="of the victims and the moments")
    parser.add_argument("--folder", type=Path, help="for the runs; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory("-chaos") as temporary:
        folder = options.folder or Path(temporary)
        config = chaos_config(Inputs.make(folder / "inputs"), options.kills)
        undisturbed = undisturbed_digests(config, folder / "undisturbed")
        kills: list[Kill] = []
        digests = run_chaos(config, folder / "run", options.kills, random.Random(options.seed), kills, say)
    is_same = digests == undisturbed
    recovered = sorted(kill.recovery_s for kill in kills if kill.recovery_s)
    say(f"{len(kills)} kills and stops of {options.kills}, {len(recovered)} recoveries")
    if recovered:
        say(f"time to the next good step: median {recovered[len(recovered) // 2]:.1f} s, longest {recovered[-1]:.1f} s")
    say("the weights are those of the undisturbed run" if is_same else f"THE WEIGHTS DIFFER: {digests}, {undisturbed}")
    return 0 if is_same and len(recovered) == len(kills) == options.kills else 1


def say(line: str) -> None:
    """One line of output, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
