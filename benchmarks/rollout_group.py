"""Measures what a rollout group brings: step times of GRPO on two cores, with and without the group.

    python -m benchmarks.rollout_group [--rounds 3] [--steps 6] [key.path=value ...]

Blocks of steps alternate between the placements. Learning rates are 0, so that every block works on the same rollouts.
The first two steps of each block are left out. Figures are medians; only ratios within one run mean anything on a
shared machine.

The formula is that of docs/rollout-groups.md, from the parts that the group at staleness 0 has timed:

    staleness 0:  sync + gen + learn          learn = old log-probs + advantages + actor's update + publish
    staleness 1:  max(sync + probe + gen, learn)

At last a rank is killed in one run of each group: the seconds until the rollout group has sampled the next responses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from recipes.sort_letters.prepare import prepare
from splitppo.run_folder.step_file import METRICS_FILE, read_metrics
from splitppo.run_folder.trace import TRACE_FILE, read_trace

RECIPE = Path("recipes/sort_letters/cpu.yaml")
FIXED = (
    *("actor.lr=0", "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false", "rollout.n=4"),
    *("data.train_batch_size=64", "actor.ppo_mini_batch_size=16", "run.schedule=gather", "rollout.stream_groups=1"),
    *("algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.bypass_mode=false"),
    *("evaluation.test_freq=-1", "evaluation.min_accuracy=0", "data.val_files=[]", "tracking.trackers=[]"),
    *("checkpoint.save_freq=-1", "checkpoint.save_last=false"),
)
ALONE = ("services.actor.cpus=[0]",)
GROUP = (*ALONE, "services.rollout.num_processes=1", "services.rollout.threads=1", "services.rollout.cpus=[1]")
PLACEMENTS = {
    "actor, 1 rank": ALONE,
    "actor, 2 ranks": ("services.actor.num_processes=2",),
    "group, staleness 0": GROUP,
    "group, staleness 1": (*GROUP, "rollout.staleness=1"),
}
NUM_WARM_UP = 2
# The points at which a group is killed, in step 3.
KILLS = {"rollout group": "rollout.generate", "actor": "actor.update.begin"}
Row = Mapping[str, float]


@contextmanager
def run(overrides: Sequence[str], num_steps: int) -> Iterator[Path]:
    """Trains a few steps as users do; the run folder is there in the `with` block."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [*FIXED, *overrides, f"run.dir={folder}/run", f"run.total_steps={num_steps}"]
        command = [sys.executable, "-m", "controller", "--config", str(RECIPE), *keys]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        yield Path(folder, "run")


def block(overrides: Sequence[str], num_steps: int) -> list[Row]:
    """Returns the metrics of a few steps, without the first ones and the last one, which samples nothing ahead."""
    with run(overrides, num_steps) as folder:
        return [line for line in read_metrics(folder / METRICS_FILE) if NUM_WARM_UP < line["step"] < num_steps]


def recovery_s(point: str, overrides: Sequence[str]) -> float:
    """Returns the seconds from a kill to the end of the next generation by the rollout group."""
    kill = (f"debug.failpoints={{{point}: {{step: 3, action: kill}}}}", "services.restart_backoff_s=0.1")
    with run((*PLACEMENTS["group, staleness 1"], *overrides, *kill, "checkpoint.save_freq=1"), 5) as folder:
        [mark] = (folder / "failpoints").glob("*.fired")
        killed_s: float = json.loads(mark.read_text())["unix_s"]
        ends = (span.finished_s for span in read_trace(folder / TRACE_FILE) if span.pool == "rollout")
        return min(end_s for end_s in ends if end_s > killed_s) - killed_s


def median_ms(rows: Sequence[Row], *names: str) -> float:
    """Returns the sum of the medians of these timings, in milliseconds; a timing that no row has counts as 0."""
    values = ([row[f"timing_s/{name}"] for row in rows if f"timing_s/{name}" in row] for name in names)
    return 1e3 * sum(statistics.median(of_one) for of_one in values if of_one)


def report(rows: Mapping[str, Sequence[Row]]) -> str:
    """Returns the table, and the ratios of the step times."""
    parts = rows["group, staleness 0"]
    gen = median_ms(parts, "gen")  # with sync
    learn = median_ms(parts, "old_log_prob", "adv", "update_actor", "publish")
    formula = {"group, staleness 0": gen + learn, "group, staleness 1": max(gen, learn)}
    heads = f"{'steps':>6}{'step ms':>9}{'formula ms':>11}{'gen':>7}{'update':>8}{'wait':>6}{'bubble':>8}"
    lines = [f"{'placement':<20}{heads}"]
    for name, own in rows.items():
        step = median_ms(own, "step")
        bubble = statistics.median([row.get("overlap/bubble_rollout", float("nan")) for row in own])
        lines.append(
            f"{name:<20}{len(own):>6}{step:>9.0f}{formula.get(name, float('nan')):>11.0f}{median_ms(own, 'gen'):>7.0f}"
            f"{median_ms(own, 'update_actor'):>8.0f}{median_ms(own, 'wait_rollouts'):>6.0f}{bubble:>8.2f}"
        )
    steps = {name: median_ms(own, "step") for name, own in rows.items()}
    ahead = steps["group, staleness 1"]
    lines += [
        "",
        f"staleness 1 / formula: {ahead / formula['group, staleness 1']:.2f} (goal: 0.85 to 1.15)",
        f"staleness 1 / actor on both cores: {ahead / steps['actor, 2 ranks']:.2f}",
        f"staleness 1 / actor on one core: {ahead / steps['actor, 1 rank']:.2f}",
    ]
    return "\n".join(lines)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="blocks per placement")
    parser.add_argument("--steps", type=int, default=6, help="steps per block")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    options = parser.parse_args()
    prepare(Path(".cache/sort_letters"))
    rows: dict[str, list[Row]] = defaultdict(list)
    for _ in range(options.rounds):
        for name, placement in PLACEMENTS.items():
            rows[name] += block([*placement, *options.overrides], options.steps)
    print(report(rows))
    for victim, point in KILLS.items():
        print(f"{victim} killed: {recovery_s(point, options.overrides):.1f} s to the next generation")


if __name__ == "__main__":
    main()
