"""Shows that partial rollouts learn as whole responses do: sorting letters, with response lengths that have a tail.

    python -m benchmarks.partial_learning [--seeds 1 2 3] [--steps 16] [--output runs/partial_learning]

The quickstart's task, model and keys with longer words: 3 to 20 letters, most of them short, and letters may come
twice. So responses have 9 to 26 tokens. "partial" samples at most C = 10 tokens of a response in a step; both have the
same correction. Accuracies, held-out and greedy, are compared at equal numbers of learned tokens: those of the run that
has learned the fewest. What is finished is not run again. The table also has `partial/length_ratio`, the mean length of
what is learned over that of what is drawn: the first steps learn short responses.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.curves import METRIC, is_finished
from benchmarks.overlap import Row
from recipes.made_once import make_once
from recipes.qwen2_tokenizer import save_tokenizer
from recipes.rows import write_parquet
from recipes.sort_letters.prepare import EOS, PAD, make_tokenizer
from recipes.sort_letters.task import LETTERS, Words, rows_of
from recipes.sort_letters.warm_start import examples
from splitppo.run_folder.step_file import METRICS_FILE, read_metrics

SHORTEST, LONGEST = 3, 20
LONGER_SHARE = 0.75  # of words with so many letters that have one more
NUM_WORDS = {"val": 512, "train": 4096, "warm_start": 20_000}
WARM_START_STEPS = 300
BATCH_SIZE = 128
CORRECTION = ("rollout.stream_groups=1", "algorithm.rollout_correction.rollout_is=token")
VARIANTS = {"off": CORRECTION, "partial": (*CORRECTION, "rollout.max_step_tokens=10")}


def make_words(seed: int) -> Words:
    """Draws disjoint sets of words; the number of letters is geometric."""
    draws = random.Random(seed)
    words: list[str] = []
    known: set[str] = set()
    while len(words) < sum(NUM_WORDS.values()):
        num_letters = SHORTEST
        while num_letters < LONGEST and draws.random() < LONGER_SHARE:
            num_letters += 1
        word = "".join(draws.choices(LETTERS, k=num_letters))
        if word not in known:
            known.add(word)
            words.append(word)
    val, train = words[: NUM_WORDS["val"]], words[NUM_WORDS["val"] : -NUM_WORDS["warm_start"]]
    # `examples` draws a length first, of 3 to 5 letters: each of these stands for words of any length here.
    others = words[-NUM_WORDS["warm_start"] :]
    return Words(val, train, dict.fromkeys((3, 4, 5), others))


def make(folder: Path) -> None:
    """Fills a folder with prompts, tokenizer and a warm-started model."""
    from recipes import warm_start  # imports torch, which a folder that is ready does not need

    words = make_words(0)
    for split, chosen in (("train", words.train), ("val", words.val)):
        write_parquet(rows_of(chosen, split), folder / f"{split}.parquet")
    tokenizer = make_tokenizer()
    config = warm_start.small_qwen2(tokenizer, eos=EOS, pad=PAD, max_position_embeddings=64)
    demonstrations = examples(words, tokenizer, eos=config.eos_token_id, seed=0)
    model = warm_start.train(config, demonstrations, WARM_START_STEPS, seed=0)
    model.save_pretrained(folder / "model")
    save_tokenizer(tokenizer, folder / "model", named_tokens={"eos_token": EOS, "pad_token": PAD, "unk_token": EOS})


def run(inputs: Path, folder: Path, seed: int, num_steps: int, changes: Sequence[str]) -> None:
    """Runs a variant to its end, unless that is done; a run that was killed goes on."""
    if is_finished(folder):
        return
    print(f"{folder}", flush=True)
    overrides = (
        *(f"run.dir={folder}", f"run.seed={seed}", f"run.total_steps={num_steps}", "run.schedule=gather"),
        *(f"data.{split}_files={inputs}/{split}.parquet" for split in ("train", "val")),
        *(f"data.train_batch_size={BATCH_SIZE}", "actor.ppo_mini_batch_size=32"),
        *("data.max_prompt_length=25", "data.max_response_length=26", f"actor.model={inputs}/model"),
        *("evaluation.test_freq=2", "evaluation.min_accuracy=0", "tracking.trackers=[]", "checkpoint.save_freq=4"),
        "checkpoint.keep=1",
    )
    command = [sys.executable, "-m", "controller", "--config", "recipes/sort_letters/cpu.yaml", *overrides, *changes]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} exited with {ended.returncode}:\n{ended.stderr}")


def learned_tokens(rows: Sequence[Row]) -> Mapping[int, float]:
    """Returns by step how many response tokens were learned so far."""
    trained = [row for row in rows if row.get("response_length/mean") is not None and row["step"]]
    totals = np.cumsum([row["response_length/mean"] * BATCH_SIZE for row in trained])
    return {0: 0.0} | {int(row["step"]): float(total) for row, total in zip(trained, totals, strict=True)}


def accuracy_at(rows: Sequence[Row], num_tokens: float) -> float:
    """Returns the accuracy after so many learned tokens, between the two validations beside it."""
    tokens = learned_tokens(rows)
    validated = [(tokens[int(row["step"])], row[METRIC]) for row in rows if row.get(METRIC) is not None]
    return float(np.interp(num_tokens, *zip(*validated, strict=True)))


def table_of(runs: Mapping[tuple[str, int], Sequence[Row]]) -> Iterator[str]:
    """Returns a Markdown table of all runs; accuracies are at shares of the tokens that every run has learned."""
    total = min(max(learned_tokens(rows).values()) for rows in runs.values())
    yield (
        f"| | seed | accuracy before | at {total / 4:.0f} tokens | at {total / 2:.0f} | at {total:.0f} |"
        " mean length learned in steps 1, 2, 3, 4 | `partial/length_ratio` in steps 1, 2, 3, 4 |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for (name, seed), rows in runs.items():
        accuracies = (accuracy_at(rows, share * total) for share in (0.0, 0.25, 0.5, 1.0))
        first = [row for row in rows if 1 <= row["step"] <= 4]
        lengths = ", ".join(f"{row['response_length/mean']:.1f}" for row in first)
        ratios = ", ".join(f"{row['partial/length_ratio']:.2f}" for row in first if "partial/length_ratio" in row)
        figures = (name, seed, *(f"{accuracy:.3f}" for accuracy in accuracies), lengths, ratios)
        yield f"| {' | '.join(map(str, figures))} |"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--output", type=Path, default=Path("runs/partial_learning"))
    options = parser.parse_args()
    inputs = options.output / "inputs"
    make_once(inputs, {"warm_start_steps": WARM_START_STEPS}, make)
    runs = {}
    for seed in options.seeds:
        for name, changes in VARIANTS.items():
            folder = options.output / name / f"seed_{seed}"
            run(inputs, folder, seed, options.steps, changes)
            runs[name, seed] = read_metrics(folder / METRICS_FILE)
    print("\n".join(table_of(dict(sorted(runs.items())))))


if __name__ == "__main__":
    main()
