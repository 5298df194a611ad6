"""Measures the worth of scores on tokens: sort_letters, each letter scored at its place or all at the end.

    python -m benchmarks.token_scores [--seeds 1 2 3] [--output runs/curves]

Of each seed two runs are trained that differ in nothing but where the same scores are put: the share of the letters
that stand in their places (benchmarks/letter_scores.py). The figure of a run is its mean held-out score, greedy, over
the validations after each of ten steps; runs are paired by their seeds. Runs are those of benchmarks/curves.py:
resumable, in OUTPUT, where token_scores.md is made of them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.curves import Algorithm, curves_of, run
from recipes.sort_letters.prepare import prepare

SCORER = Path(__file__).with_name("letter_scores.py")
NUM_STEPS = 10


def arm(name: str, *changes: str, is_placed: bool) -> Algorithm:
    """Returns the runs of one kind."""
    settings = (
        f"run.total_steps={NUM_STEPS}",
        f"reward.custom_function_path={SCORER}",
        f"reward.custom_function_kwargs={{is_placed: {str(is_placed).lower()}}}",
        "evaluation.test_freq=1",
    )
    return Algorithm(f"{name}_{'on_tokens' if is_placed else 'at_the_end'}", (*settings, *changes))


def pair(name: str, *changes: str) -> tuple[Algorithm, Algorithm]:
    """Returns two kinds of runs: scores at the end, and scores on tokens."""
    return arm(name, *changes, is_placed=False), arm(name, *changes, is_placed=True)


PAIRS: Mapping[str, tuple[Algorithm, Algorithm]] = {
    "GAE": pair("gae"),
    "REINFORCE++ (no values)": pair("reinforce_plus_plus", "algorithm.adv_estimator=reinforce_plus_plus"),
}


def means(algorithm: Algorithm, output: Path) -> Mapping[int, float]:
    """Returns the mean held-out score over the steps, by seed."""
    return {
        seed: statistics.fmean(score for step, score in curve.accuracy.items() if step)
        for seed, curve in curves_of(algorithm, output).items()
        if curve.accuracy
    }


def table(output: Path) -> Iterator[str]:
    """Returns a Markdown table: a row for each estimator and seed, and their means."""
    yield f"| mean held-out score, steps 1-{NUM_STEPS} | seed | at the end | on tokens | difference |"
    yield "|---|---|---|---|---|"
    for name, arms in PAIRS.items():
        at_end, placed = (means(algorithm, output) for algorithm in arms)
        seeds = sorted(set(at_end) & set(placed))
        for seed in seeds:
            yield row(name, str(seed), at_end[seed], placed[seed])
        if len(seeds) > 1:
            yield row(name, "mean", *(statistics.fmean(own[seed] for seed in seeds) for own in (at_end, placed)))


def row(name: str, seed: str, at_end: float, placed: float) -> str:
    """Returns a line of the table."""
    return f"| {name} | {seed} | {at_end:.3f} | {placed:.3f} | {placed - at_end:+.3f} |"


def train(seeds: Sequence[int], output: Path) -> None:
    """Runs what is not finished; the table is made anew after each seed."""
    for arms in PAIRS.values():
        for seed in seeds:
            for algorithm in arms:
                run(algorithm, seed, output / algorithm.name / f"seed_{seed}")
            (output / "token_scores.md").write_text("\n".join(table(output)) + "\n", encoding="utf-8")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path, default=Path("runs/curves"))
    options = parser.parse_args()
    prepare()
    train(options.seeds, options.output)
    print("\n".join(table(options.output)))


if __name__ == "__main__":
    main()
