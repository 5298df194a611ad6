"""python -m tests.kill_matrix [--only PATTERN] [--folder DIR]: runs the cells, prints a table; exit 1 if one fails."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
import time
from pathlib import Path

from tests.kill_matrix.adapter_cells import adapter_cells_at
from tests.kill_matrix.cells import STEP, cells_at, frozen_model_cells_at, mesh_cells_at
from tests.kill_matrix.conversation_cells import (
    agent_cells_at,
    conversation_cells_at,
    privileged_cells_at,
    recorded_cells_at,
)
from tests.kill_matrix.harness import matrix_config, replayed_digests, run_cells, undisturbed_digests
from tests.kill_matrix.image_cells import image_cells_at
from tests.kill_matrix.partial_cells import partial_cells_at
from tests.kill_matrix.rollout_cells import ROLLOUT_GROUP_CELLS
from tests.kill_matrix.sequence_cells import sequence_cells_at
from tests.kill_matrix.start_cells import start_cells_at
from tests.kill_matrix.teacher_cells import teacher_cells_at
from tests.support.image_runs import write_image_inputs
from tests.support.runs import Inputs

CELLS = (
    *cells_at(STEP).values(),
    *start_cells_at(STEP),
    *frozen_model_cells_at(STEP).values(),
    *ROLLOUT_GROUP_CELLS,
    *mesh_cells_at(STEP),
    *adapter_cells_at(STEP),
    *conversation_cells_at(STEP),
    *privileged_cells_at(STEP),
    *agent_cells_at(STEP),
    *recorded_cells_at(STEP),
    *teacher_cells_at(STEP),
    *sequence_cells_at(STEP),
    *partial_cells_at(STEP),
    *image_cells_at(STEP),
)


def main() -> int:
    """Runs every cell that matches, one after the other, each in a run of its own."""
    parser = argparse.ArgumentParser(prog="tests.kill_matrix", description=__doc__)
    parser.add_argument("--only", default="*", help="cells, e.g. 'actor_1-*', or moments, e.g. 'mesh_*'")
    parser.add_argument("--folder", type=Path, help="for the runs; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory("-kill-matrix") as temporary:
        return run_matrix(options.folder or Path(temporary), options.only)


def run_matrix(folder: Path, only: str) -> int:
    """Prints a line per cell as it ends, then the table; returns the exit status."""
    inputs = Inputs.make(folder / "inputs")
    write_image_inputs(inputs.folder)
    config = matrix_config(inputs)
    undisturbed: dict[tuple[str, ...], dict[str, str]] = {}
    table: dict[tuple[str, str], str] = {}
    num_failed, began_at_s = 0, time.monotonic()
    cells = [cell for cell in CELLS if any(fnmatch.fnmatch(name, only) for name in (cell.name, cell.moment))]
    for cell in cells:
        if cell.kind not in undisturbed and not cell.is_recorded:
            undisturbed[cell.kind] = digests = undisturbed_digests(config, folder / "undisturbed", *cell.kind)
            of = " ".join(("undisturbed", *cell.kind))
            say(f"{of}: actor {digests['actor'][:12]} critic {digests['critic'][:12]}")
        began_s = time.monotonic()
        table[cell.victim, cell.moment], outcome = "FAILED", ""
        try:
            verdict = run_cells(cell.incidents, config, folder / cell.name)
            if cell.is_recorded:
                undisturbed[cell.kind] = replayed_digests(config, folder / "undisturbed", verdict.folder, *cell.kind)
            failures = verdict.failures(undisturbed[cell.kind])
            if not failures:
                fired = verdict.fired[cell.name]
                outcome = f"{fired.recovery_s:5.1f} s to the next good step, pid {fired.mark['pid']}"
                table[cell.victim, cell.moment] = f"{fired.recovery_s:.1f} s"
        except (AssertionError, TimeoutError, ValueError) as error:
            failures = [str(error)]
        num_failed += bool(failures)
        word = "; ".join(failures) if failures else "same weights, nobody else restarted"
        say(f"{cell.name:42s} {time.monotonic() - began_s:5.1f} s  {outcome}  {word}")
    victims, moments = (list(dict.fromkeys(names)) for names in zip(*table, strict=True)) if table else ([], [])
    say(f"\n{'':30s}" + "".join(f"{victim:>16s}" for victim in victims))
    for moment in moments:
        say(f"{moment:30s}" + "".join(f"{table.get((victim, moment), ''):>16s}" for victim in victims))
    seconds = time.monotonic() - began_at_s
    say(f"\n{len(table) - num_failed} of {len(table)} cells ended as an undisturbed run, in {seconds / 60:.1f} min")
    return 1 if num_failed else 0


def say(line: str) -> None:
    """One line of output, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
