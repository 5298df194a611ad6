"""python -m benchmarks.prefix_bound RUN: what the quickstart's critic explains, beside what prefixes alone explain.

For each step of a recorded run of sort_letters: the explained variance of the Monte-Carlo returns by the critic
(critic/mc_explained_var), and by the best prediction that knows two things of a token: its position, and whether the
response before it is the beginning of the right answer. That prediction is the mean return of all tokens of the step
that agree in both, so it has seen the returns that it predicts; a critic has not. It is no upper bound of all critics:
it knows nothing of the prompt, and not in which way a wrong beginning is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.tracking.step_metrics import explained_variance
from recipes.sort_letters.task import MARKER
from splitppo.run_folder.files import RunDir, Unreadable
from splitppo.run_folder.rollouts import read_footer, read_rows

Float64s = NDArray[np.float64]


def main() -> int:
    """Prints a line for each recorded step; returns 2 if its first step cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run of recipes/sort_letters, such as runs/quickstart")
    folder = RunDir(parser.parse_args().run)
    for step in itertools.count(1):
        try:
            values_N, returns_N, groups_N = tokens_of(rows_of_step(folder, step))
        except Unreadable as error:
            if step == 1:
                print(f"prefix_bound: {error}", file=sys.stderr)
                return 2
            return 0
        critic, prefixes = explained_variance(values_N, returns_N), explained_by_groups(groups_N, returns_N)
        print(f"step {step}: the critic explains {critic:.2f}, prefixes {prefixes:.2f}", flush=True)
    return 0


def rows_of_step(folder: RunDir, step: int) -> Iterable[Mapping[str, Any]]:
    """Yields the responses of a step with their lists of tokens.

    Raises:
        Unreadable: the step or one of its responses cannot be read, or was recorded without text, values or rewards.
    """
    for row in read_rows(folder, "train", step, range(read_footer(folder, step)["num_rows"])):
        if isinstance(row, Unreadable):
            raise row
        if missing := [name for name in ("response", "ground_truth", "ends", "value", "rewards") if row[name] is None]:
            raise Unreadable(f"step {step} has a response without {', '.join(missing)}.")
        yield row


def tokens_of(rows: Iterable[Mapping[str, Any]]) -> tuple[Float64s, Float64s, NDArray[np.int64]]:
    """Returns value, Monte-Carlo return and group of all tokens of these responses, for a discount factor of 1.

    Tokens of the same group have the same position and what stands before them is, or is not, how the answer begins.
    """
    values: list[float] = []
    returns: list[float] = []
    groups: list[int] = []
    for row in rows:
        answer = MARKER + row["ground_truth"]
        begins = [0, *row["ends"][:-1]]
        values += row["value"]
        returns += np.cumsum(row["rewards"][::-1], dtype=np.float64)[::-1].tolist()
        groups += [2 * position + answer.startswith(row["response"][:begin]) for position, begin in enumerate(begins)]
    return np.array(values, np.float64), np.array(returns, np.float64), np.array(groups, np.int64)


def explained_by_groups(groups_N: NDArray[np.int64], returns_N: Float64s) -> float:
    """Returns the explained variance of the returns by the mean return of each token's group."""
    _, groups_N = np.unique(groups_N, return_inverse=True)
    means_G = np.bincount(groups_N, returns_N) / np.bincount(groups_N)
    return explained_variance(means_G[groups_N], returns_N)


if __name__ == "__main__":
    sys.exit(main())
