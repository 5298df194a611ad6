"""Learning curves of a recipe by several algorithms, from the same model, with equal responses per step.

    python -m benchmarks.curves [--only ppo grpo] [--seeds 1 2 3] [--output runs/curves]

Each run is an ordinary one of `python -m controller` in OUTPUT/ALGORITHM/seed_N. What is finished is not run again,
what was killed goes on from its last checkpoint, and a run whose settings have changed starts afresh. After every run
curves.md and its pictures are made of all that there is: the held-out greedy accuracy, median and range over the seeds.
To add an algorithm, add a line to ALGORITHMS; to add a picture, a group of lines to PICTURES.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, cycle
from pathlib import Path
from statistics import median_high
from typing import Any

from matplotlib.figure import Figure

from recipes.clerk.prepare import RECIPE as CLERK
from recipes.clerk.prepare import make as make_clerk
from recipes.fresh_run import remove_run
from recipes.guess_number.prepare import RECIPE as GUESS_NUMBER
from recipes.guess_number.prepare import make as make_guess_number
from recipes.read_digits.prepare import RECIPE as READ_DIGITS
from recipes.sort_letters.prepare import RECIPE as SORT_LETTERS
from recipes.sort_letters.prepare import make as make_sort_letters
from recipes.sort_letters.teach import TAUGHT, Taught
from recipes.take_notes.prepare import RECIPE as TAKE_NOTES
from recipes.warm_started import WarmStarted
from splitppo.atomic_write import write_atomically
from splitppo.run_folder.step_file import METRICS_FILE, read_metrics

METRIC = "val/accuracy"
TOKENS = "perf/total_num_tokens"
# The explained variance of a critic, of the returns of whole responses; and the steps that a table averages it over.
EXPLAINED = "critic/mc_explained_var"
EXPLAINED_STEPS = range(3, 9)
GOAL = 0.85
# Of all runs.
COMMON = (
    "evaluation.min_accuracy=0",
    "tracking.trackers=[]",
    "checkpoint.save_freq=4",
    "checkpoint.keep=1",
)
# Recipes that are validated after so many steps, the others after each.
TEST_FREQ = {SORT_LETTERS: 2, TAKE_NOTES: 2, READ_DIGITS: 10}
# Of sort_letters: 256 responses per step, and four optimizer steps.
IN_GROUPS = ("data.train_batch_size=32", "rollout.n=8", "actor.ppo_mini_batch_size=8")

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444")


@dataclass(frozen=True)
class Algorithm:
    """One line of the picture: a name, and the keys of the recipe's configuration that have another value."""

    name: str
    changes: tuple[str, ...] = ()
    recipe: WarmStarted = SORT_LETTERS

    @property
    def overrides(self) -> tuple[str, ...]:
        return (f"evaluation.test_freq={TEST_FREQ.get(self.recipe, 1)}", *COMMON, *self.changes)


# Hyper-parameters of each algorithm, beside those of the recipe: PPO's.
ALGORITHMS = (
    Algorithm("ppo"),
    Algorithm("grpo", ("algorithm.adv_estimator=grpo", *IN_GROUPS)),
    Algorithm("rloo", ("algorithm.adv_estimator=rloo", *IN_GROUPS)),
    Algorithm("reinforce_plus_plus", ("algorithm.adv_estimator=reinforce_plus_plus",)),
    Algorithm("remax", ("algorithm.adv_estimator=remax",)),
    Algorithm(
        "gspo",
        (
            "algorithm.adv_estimator=grpo",
            *IN_GROUPS,
            "actor.policy_loss.loss_mode=gspo",
            "actor.loss_agg_mode=seq-mean-token-mean",
        ),
    ),
    # Without a lower bound, as MiniMax trains it; nothing else holds the policy near the old one: smaller steps.
    Algorithm(
        "cispo",
        (
            "algorithm.adv_estimator=grpo",
            *IN_GROUPS,
            "actor.policy_loss.loss_mode=cispo",
            "actor.clip_ratio_low=0.99",
            "actor.lr=1.5e-4",
        ),
    ),
)
# PPO on responses of the weights before the last update, with either correction.
STALE = (
    Algorithm("ppo_stale_token", ("rollout.staleness=1", "algorithm.rollout_correction.rollout_is=token")),
    Algorithm("ppo_stale_bypass", ("rollout.staleness=1", "algorithm.rollout_correction.bypass_mode=true")),
)
# Adapters beside frozen weights, with ten times the learning rates of the recipe.
WITH_ADAPTERS = ("actor.lora_rank=16", "actor.lora_alpha=16", "actor.lr=3e-3")
LORA = (
    Algorithm("ppo_lora", (*WITH_ADAPTERS, "critic.lora_rank=16", "critic.lora_alpha=16", "critic.lr=1e-2")),
    Algorithm("grpo_lora", ("algorithm.adv_estimator=grpo", *IN_GROUPS, *WITH_ADAPTERS)),
)
# Conversations: 512 per step with a reward at the end, and 64 per step with a reward for each turn.
GUESSES_IN_GROUPS = ("data.train_batch_size=64", "rollout.n=8", "actor.ppo_mini_batch_size=8")
GUESSES = (
    Algorithm("guess_number_gae", (), GUESS_NUMBER),
    Algorithm("guess_number_gae_turn_lam", ("algorithm.lam=1", "algorithm.turn_lam=0.8"), GUESS_NUMBER),
    Algorithm("guess_number_grpo", ("algorithm.adv_estimator=grpo", *GUESSES_IN_GROUPS), GUESS_NUMBER),
    Algorithm("guess_number_reinforce_plus_plus", ("algorithm.adv_estimator=reinforce_plus_plus",), GUESS_NUMBER),
)
REQUESTS_IN_GROUPS = ("data.train_batch_size=8", "rollout.n=8", "actor.ppo_mini_batch_size=2")
ONE_RATE = "algorithm.turn_lam=null"
REQUESTS = (
    Algorithm("clerk_gae", (), CLERK),
    Algorithm("clerk_gae_lam_1", (ONE_RATE,), CLERK),
    # Nearly the same decay from turn to turn, by a lambda for every token: turns have two.
    Algorithm("clerk_gae_lam_0.7", ("algorithm.lam=0.7", ONE_RATE), CLERK),
    Algorithm("clerk_grpo", ("algorithm.adv_estimator=grpo", ONE_RATE, *REQUESTS_IN_GROUPS), CLERK),
    Algorithm("clerk_reinforce_plus_plus", ("algorithm.adv_estimator=reinforce_plus_plus", ONE_RATE), CLERK),
)
# Episodes of six contexts, 256 per step: advantages from one context to the next, or each context for itself.
PER_SEGMENT = ("algorithm.custom_path=benchmarks/segment_rewards.py", "algorithm.adv_estimator=reward_per_segment")
OF_BOOKS = "run.total_steps=16"
LAM_1 = "algorithm.lam=1"
NOTES = (
    Algorithm("take_notes_gae", (OF_BOOKS,), TAKE_NOTES),
    Algorithm("take_notes_per_segment", (OF_BOOKS, *PER_SEGMENT), TAKE_NOTES),
    Algorithm("take_notes_gae_lam_1", (OF_BOOKS, LAM_1), TAKE_NOTES),
    Algorithm("take_notes_per_segment_lam_1", (OF_BOOKS, LAM_1, *PER_SEGMENT), TAKE_NOTES),
)
# Images: 128 with four responses each per step; the vision tower trained or frozen, and the images of other rows.
IN_FOURS = ("algorithm.adv_estimator=grpo",)
FROZEN_TOWER = ("actor.freeze_vision_tower=true", "critic.freeze_vision_tower=true")
SHUFFLED = tuple(f"data.{split}_files={READ_DIGITS.output}/shuffled/{split}.parquet" for split in ("train", "val"))
DIGITS = tuple(
    Algorithm(f"read_digits_{name}", changes, READ_DIGITS)
    for name, changes in {
        "ppo": (),
        "grpo": IN_FOURS,
        "ppo_frozen": FROZEN_TOWER,
        "grpo_frozen": (*IN_FOURS, *FROZEN_TOWER),
        "ppo_shuffled": SHUFFLED,
        "grpo_shuffled": (*IN_FOURS, *SHUFFLED),
    }.items()
)


@dataclass(frozen=True)
class HalfWidth(WarmStarted):
    """A recipe with a second model, of half the width and with the same tokenizer, in a folder beside its own.

    Attributes:
        whole: the recipe with the model of full width, whose files are made, too.
    """

    whole: WarmStarted = field(kw_only=True)

    @property
    def output(self) -> Path:
        """The folder of the smaller model."""
        return Path(".cache") / f"{self.name}_half"

    @property
    def model(self) -> str:
        """The model of half the width."""
        return f"{self.output}/model"

    def prepare(self, *arguments: Any, **options: Any) -> None:
        """Makes the files of both folders, unless they are there."""
        super().prepare(*arguments, **options)
        self.whole.prepare()


class HalfWidthTaught(HalfWidth, Taught):
    """The model of half the width as the student of the quickstart's trained policy."""


def fields_of_half(recipe: WarmStarted, make: Callable[..., None], hidden_size: int) -> Mapping[str, Any]:
    """Returns the fields of a recipe whose second model has another width."""
    return {**vars(recipe), "make": partial(make, hidden_size=hidden_size), "whole": recipe}


HALF = HalfWidth(**fields_of_half(SORT_LETTERS, make_sort_letters, 64))
HALF_TAUGHT = HalfWidthTaught(**fields_of_half(SORT_LETTERS, make_sort_letters, 64))
GUESS_NUMBER_HALF = HalfWidth(**fields_of_half(GUESS_NUMBER, make_guess_number, 32))
CLERK_HALF = HalfWidth(**fields_of_half(CLERK, make_clerk, 32))
# A teacher: the quickstart's trained policy, whose student is the warm-started one, or one of half the width.
EACH_STEP = "evaluation.test_freq=1"
IS_HALF = f"actor.model={HALF.model}"
EAGER = ("actor.lr=6e-4", "actor.lr_warmup_steps=0")
OF_STUDENT = ("run.total_steps=12", "actor.lr=3e-4")
TEACHER_IN_REWARD = (
    "teacher.signal=reward",
    "algorithm.adv_estimator=gae",
    "critic.lr=1e-3",
    "critic.betas=[0.9,0.99]",
)
SORT_LETTERS_TAUGHT = (
    Algorithm("ppo_each_step", (EACH_STEP,)),
    Algorithm("ppo_each_step_eager", (EACH_STEP, *EAGER)),
    Algorithm("teacher_advantage", (*OF_STUDENT, "teacher.signal=advantage"), recipe=TAUGHT),
    Algorithm("teacher_reward", (*OF_STUDENT, *TEACHER_IN_REWARD), recipe=TAUGHT),
    Algorithm("teacher_top_k", OF_STUDENT, recipe=TAUGHT),
    Algorithm("teacher_top_k_eager", ("run.total_steps=12",), recipe=TAUGHT),
)
HALF_WIDTH = (
    Algorithm("half_ppo", (EACH_STEP, IS_HALF), HALF),
    Algorithm("half_teacher_advantage", (*OF_STUDENT, "teacher.signal=advantage", IS_HALF), HALF_TAUGHT),
    Algorithm("half_teacher_top_k_eager", ("run.total_steps=12", IS_HALF), HALF_TAUGHT),
)


def critics(plain: Algorithm, none: Algorithm, half: HalfWidth, *, privileged_prompt: str) -> Sequence[Algorithm]:
    """Returns lines of one task with a plain critic, three others, and none: the algorithm `none` compares samples."""
    is_told = (f'critic.privileged_prompt="{privileged_prompt}"', "critic.max_privileged_length=16")
    others = {
        "privileged": (is_told, plain.recipe),
        "frozen": (("critic.freeze=[self_attn]",), plain.recipe),
        "smaller": ((f"critic.model={half.model}",), half),
    }
    lines = (
        Algorithm(f"{plain.name}_{name}", (*plain.changes, *changes), recipe)
        for name, (changes, recipe) in others.items()
    )
    return (plain, *lines, none)


CRITICS = {
    "critics_guess_number": critics(GUESSES[0], GUESSES[2], GUESS_NUMBER_HALF, privileged_prompt="{ground_truth}"),
    "critics_sort_letters": critics(
        SORT_LETTERS_TAUGHT[0],
        Algorithm("grpo_each_step", (EACH_STEP, *ALGORITHMS[1].changes)),
        HALF,
        privileged_prompt="{ground_truth}",
    ),
    "critics_clerk": critics(REQUESTS[0], REQUESTS[3], CLERK_HALF, privileged_prompt="{requests}"),
}
# By the name of the picture.
PICTURES: Mapping[str, Sequence[Algorithm]] = {
    "curves": ALGORITHMS,
    "staleness": (ALGORITHMS[0], *STALE),
    "lora": (*ALGORITHMS[:2], *LORA),
    "guess_number": GUESSES,
    "clerk": REQUESTS,
    "take_notes": NOTES,
    "read_digits": DIGITS,
    "teacher": SORT_LETTERS_TAUGHT,
    "teacher_half": HALF_WIDTH,
    **CRITICS,
}
# Of pictures with another goal than GOAL.
GOALS = {"read_digits": 0.9, "teacher": 0.95, "teacher_half": 0.95, **dict.fromkeys(CRITICS, 0.9)}


@dataclass(frozen=True)
class Curve:
    """The measurement of one run, by step; or the sentence that refused the run.

    Attributes:
        accuracy: of the validations.
        refusal: the sentence, if there is one.
        num_tokens: the tokens of prompts and responses that the run had sampled up to then.
        explained: the explained variance of the critic, of the returns of whole responses; empty without a critic.
    """

    accuracy: Mapping[int, float]
    refusal: str = ""
    num_tokens: Mapping[int, float] = field(default_factory=dict)
    explained: Mapping[int, float] = field(default_factory=dict)

    @property
    def final(self) -> float:
        return self.accuracy[max(self.accuracy)]

    def steps_to(self, goal: float) -> float:
        """Returns the step at which the goal was reached; infinite if it was not."""
        return min((step for step, accuracy in self.accuracy.items() if accuracy >= goal), default=math.inf)

    def tokens_to(self, goal: float) -> float:
        """Returns the number of tokens that had been sampled when the goal was reached; infinite if it was not."""
        return self.num_tokens.get(int(step), 0.0) if (step := self.steps_to(goal)) < math.inf else math.inf

    @property
    def mean_explained(self) -> float | None:
        """The mean explained variance of EXPLAINED_STEPS; None without a critic."""
        values = [self.explained[step] for step in EXPLAINED_STEPS if step in self.explained]
        return statistics.fmean(values) if values else None


# Of a table, by title: what a cell says of the runs of an algorithm.
Columns = Mapping[str, Callable[[Sequence[Curve]], str]]


def run(algorithm: Algorithm, seed: int, folder: Path) -> None:
    """Runs an algorithm to its end, unless that is done; if it cannot be run, the folder gets the reason."""
    overrides = [*algorithm.overrides, f"run.seed={seed}", f"run.dir={folder}"]
    settings = folder.with_name(f"{folder.name}.json")
    refusal = folder.with_name(f"{folder.name}.refused")
    if settings.is_file() and json.loads(settings.read_text()) != overrides:
        remove_run(folder)
    write_atomically(settings, json.dumps(overrides))
    refusal.unlink(missing_ok=True)
    if is_finished(folder):
        return
    print(f"{algorithm.name}, seed {seed}", flush=True)
    config = str(algorithm.recipe.config_file)
    command = [sys.executable, "-m", "controller", "--config", config, *overrides]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if ended.returncode in (1, 2):
        sentence = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        refusal.write_text(sentence)
        print(f"  {sentence}", flush=True)


def is_finished(folder: Path) -> bool:
    """Returns True if a run has come to its end."""
    summary = folder / "summary.json"
    return summary.is_file() and json.loads(summary.read_text())["exit_reason"] == "completed"


def curve_of(folder: Path) -> Curve | None:
    """Returns the curve of a run that is finished or was refused; None for any other run."""
    refusal = folder.with_name(f"{folder.name}.refused")
    if refusal.is_file():
        return Curve({}, refusal.read_text())
    if not is_finished(folder):
        return None
    rows = read_metrics(folder / METRICS_FILE)
    num_tokens = accumulate(float(row.get(TOKENS) or 0.0) for row in rows)
    return Curve(
        _by_step(rows, METRIC),
        num_tokens={int(row["step"]): tokens for row, tokens in zip(rows, num_tokens, strict=True)},
        explained=_by_step(rows, EXPLAINED),
    )


def _by_step(rows: Sequence[Mapping[str, Any]], metric: str) -> Mapping[int, float]:
    return {int(row["step"]): float(row[metric]) for row in rows if row.get(metric) is not None}


def curves_of(algorithm: Algorithm, output: Path) -> dict[int, Curve]:
    """Returns the curves by seed, of the runs that had today's settings."""
    files = {int(path.stem.removeprefix("seed_")): path for path in (output / algorithm.name).glob("seed_*.json")}
    common = list(algorithm.overrides)
    ours = {seed: path for seed, path in files.items() if json.loads(path.read_text())[: len(common)] == common}
    found = {seed: curve_of(path.with_suffix("")) for seed, path in sorted(ours.items())}
    return {seed: curve for seed, curve in found.items() if curve is not None}


def table_of(algorithms: Sequence[Algorithm], output: Path, columns: Columns) -> Iterator[str]:
    """Returns a Markdown table with a row for each algorithm: its name, cells of what was measured, its settings."""
    titles = ("algorithm", *columns, "settings beside the recipe's")
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for algorithm in algorithms:
        curves = curves_of(algorithm, output)
        measured = [curve for curve in curves.values() if curve.accuracy]
        if measured:
            cells = [cell(measured) for cell in columns.values()]
        else:
            why = next((curve.refusal for curve in curves.values()), "not run")
            cells = [why, *[""] * (len(columns) - 1)]
        settings = " ".join(f"`{change}`" for change in algorithm.changes)
        yield f"| {' | '.join((algorithm.name, *cells, settings))} |"


def columns_of_accuracy(goal: float) -> Columns:
    """Returns the columns of a table of the final accuracies, and of the steps in which the goal was reached."""
    return {
        "accuracy by seed": _finals,
        "median": lambda curves: f"{statistics.median(curve.final for curve in curves):.3f}",
        f"steps to {goal} (median)": lambda curves: _reached(median_high(curve.steps_to(goal) for curve in curves)),
    }


def columns_of_critics(goal: float) -> Columns:
    """Returns the columns of a table of what critics explain, and of the steps and tokens to the goal."""
    return {
        f"explained variance, steps {EXPLAINED_STEPS[0]} to {EXPLAINED_STEPS[-1]}, by seed": _explained,
        f"steps to {goal} by seed": lambda curves: ", ".join(_reached(curve.steps_to(goal)) for curve in curves),
        "median": lambda curves: _reached(median_high(curve.steps_to(goal) for curve in curves)),
        f"tokens to {goal} (median)": lambda curves: _reached(median_high(curve.tokens_to(goal) for curve in curves)),
        "accuracy at the end, by seed": _finals,
    }


def _finals(curves: Sequence[Curve]) -> str:
    return ", ".join(f"{curve.final:.3f}" for curve in curves)


def _explained(curves: Sequence[Curve]) -> str:
    """Returns what the critics of runs explain; nothing if the runs have no critic."""
    means = [curve.mean_explained for curve in curves]
    return "" if means.count(None) == len(means) else ", ".join("" if one is None else f"{one:.2f}" for one in means)


def _reached(number: float) -> str:
    return f"{number:,.0f}" if number < math.inf else "not reached"


def draw(algorithms: Sequence[Algorithm], output: Path, file: Path, goal: float) -> None:
    """Draws a picture: of each algorithm the median over the seeds, and the area from the worst seed to the best."""
    figure = Figure(figsize=(8, 5))
    axis = figure.subplots()
    for algorithm, colour in zip(algorithms, cycle(_COLOURS), strict=False):
        curves = [curve.accuracy for curve in curves_of(algorithm, output).values() if curve.accuracy]
        if not curves:
            continue
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        values = [[curve[step] for curve in curves] for step in steps]
        axis.plot(steps, [statistics.median(at) for at in values], color=colour, label=algorithm.name, marker="o")
        axis.fill_between(steps, [min(at) for at in values], [max(at) for at in values], color=colour, alpha=0.12)
    axis.axhline(goal, color="#8a99a6", linewidth=1, linestyle="--")
    axis.set(title=algorithms[0].recipe.name, xlabel="step", ylabel="held-out greedy accuracy", ylim=(0, 1))
    axis.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def write_report(output: Path) -> str:
    """Writes all files, and returns the tables."""
    lines = []
    for picture, algorithms in PICTURES.items():
        goal = GOALS.get(picture, GOAL)
        columns = columns_of_critics(goal) if picture in CRITICS else columns_of_accuracy(goal)
        lines += [f"### {picture}", "", *table_of(algorithms, output, columns), ""]
        draw(algorithms, output, output / f"{picture}.png", goal)
    text = "\n".join(lines)
    (output / "curves.md").write_text(text, encoding="utf-8")
    return text


def main() -> None:
    """Runs the command line."""
    known = list(dict.fromkeys(algorithm for algorithms in PICTURES.values() for algorithm in algorithms))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[algorithm.name for algorithm in known], metavar="ALGORITHM")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path, default=Path("runs/curves"))
    options = parser.parse_args()
    for algorithm in known:
        if options.only is None or algorithm.name in options.only:
            algorithm.recipe.prepare()
        for seed in options.seeds if options.only is None or algorithm.name in options.only else ():
            run(algorithm, seed, options.output / algorithm.name / f"seed_{seed}")
            write_report(options.output)
    print(write_report(options.output))


if __name__ == "__main__":
    main()
