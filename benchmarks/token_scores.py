"""What scores on tokens are worth: the quickstart's task, each letter scored where it stands or all at the end.

    python -m benchmarks.token_scores [--seeds 1 2 3] [--steps 10] [key.path=value ...]

Both score a response the same: the share of its letters that stand in their places (benchmarks/letter_scores.py). Of
each seed two runs are trained that differ in nothing but where the scores are put. The figure of a run is its mean
held-out score, greedy, over the validations after each step; runs are paired by their seeds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from controller.tracking.step_file import METRICS_FILE, read_metrics
from recipes.sort_letters.prepare import prepare

RECIPE = Path("recipes/sort_letters/cpu.yaml")
SCORER = Path(__file__).with_name("letter_scores.py")
WHERE = {"at the end": False, "on tokens": True}


def curve(folder: Path, seed: int, num_steps: int, overrides: Sequence[str], *, is_placed: bool) -> list[float]:
    """Held-out scores after steps 1 to `num_steps` of one run."""
    settings = [
        f"run.dir={folder}",
        f"run.seed={seed}",
        f"run.total_steps={num_steps}",
        f"reward.custom_function_path={SCORER}",
        f"reward.custom_function_kwargs={{is_placed: {str(is_placed).lower()}}}",
        "evaluation.test_freq=1",
        "evaluation.val_before_train=false",
        "evaluation.min_accuracy=0",
        "checkpoint.save_freq=-1",
    ]
    command = [sys.executable, "-m", "controller", "--config", str(RECIPE), *settings, *overrides]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)}\n{ended.stdout[-2000:]}")
    return [row["val/accuracy"] for row in read_metrics(folder / METRICS_FILE)]


def report(means: dict[str, list[float]], seeds: Sequence[int]) -> str:
    """A row per seed, and the paired difference."""
    lines = ["mean held-out score".ljust(24) + "".join(f"{where:>14}" for where in WHERE) + f"{'difference':>14}"]
    pairs = list(zip(*means.values(), strict=True))
    differences = [placed - at_end for at_end, placed in pairs]
    for seed, pair, difference in zip(seeds, pairs, differences, strict=True):
        lines.append(f"seed {seed}".ljust(24) + "".join(f"{mean:>14.3f}" for mean in pair) + f"{difference:>+14.3f}")
    spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
    columns = "".join(f"{statistics.fmean(own):>14.3f}" for own in means.values())
    return "\n".join(
        [*lines, "mean".ljust(24) + columns + f"{statistics.fmean(differences):>+14.3f}  (deviation {spread:.3f})"]
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("overrides", nargs="*", default=[])
    options = parser.parse_args()
    prepare()
    means: dict[str, list[float]] = {where: [] for where in WHERE}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for where, is_placed in WHERE.items():
                run = Path(folder) / f"{seed}-{is_placed}"
                scores = curve(run, seed, options.steps, options.overrides, is_placed=is_placed)
                means[where].append(statistics.fmean(scores))
                print(f"seed {seed}, {where}: {' '.join(f'{score:.3f}' for score in scores)}", flush=True)
    print(report(means, options.seeds))


if __name__ == "__main__":
    main()
