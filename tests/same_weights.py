"""`make same-weights REF=commit`: checks that the same runs, now and at that commit, end with equal weights.

The quickstart, and short runs of every schedule with one and with two actor ranks, several mini-batches and epochs, KL
in the reward and in the loss; runs with a rollout group, shares, older rollouts, partial rollouts, dynamic sampling, a
greedy baseline, a teacher, adapters, images, and conversations with one context and with several, also with a critic
that reads the answer; one of them samples with vLLM, where this environment has it. For changes that must not change
what is computed. Both trees run in this environment, each its own code, by command lines alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ("recipes.sort_letters.quickstart",)
SHORT = (
    *("controller", "--config", "recipes/sort_letters/cpu.yaml", "run.total_steps=4"),
    *("data.train_batch_size=64", "rollout.n=2", "actor.ppo_mini_batch_size=16", "actor.ppo_epochs=2"),
    *("actor.use_kl_loss=true", "checkpoint.save_freq=2", "evaluation.min_accuracy=0"),
)
RUNS = {"quickstart": QUICKSTART} | {
    f"{schedule}, {ranks} actor rank{'s' * (ranks > 1)}": (
        *SHORT,
        f"run.schedule={schedule}",
        f"services.actor.num_processes={ranks}",
    )
    for ranks in (1, 2)
    for schedule in ("serial", "gather", "overlap")
}
GROUP = ("services.rollout.num_processes=1", "services.allow_shared_devices=true")
STALE = ("rollout.staleness=1", "algorithm.rollout_correction.rollout_is=token")
# What a run samples and learns from in other ways.
RUNS |= {
    "rollout group": (*SHORT, *GROUP),
    "share 0.5": (*SHORT, *GROUP, "rollout.share=0.5", "rollout.stream_groups=2", "run.schedule=overlap"),
    "staleness 1": (*SHORT, *STALE, "rollout.stream_groups=1"),
    "rollout group, staleness 1": (*SHORT, *GROUP, *STALE, "rollout.stream_groups=1", "run.schedule=overlap"),
    "parts": (*SHORT, "rollout.stream_groups=4", "run.schedule=overlap"),
    "dynamic sampling": (*SHORT, "algorithm.filter_groups.enable=true", "algorithm.adv_estimator=grpo"),
    "greedy baseline": (*SHORT, "algorithm.adv_estimator=remax"),
    "teacher": (*SHORT, "teacher.model=.cache/sort_letters/model", "teacher.signal=top_k", "teacher.top_k=4"),
    "LoRA": (*SHORT, "actor.lora_rank=4", "critic.lora_rank=4", "actor.lr=3e-3"),
    "conversations": (
        *("recipes.guess_number.train", "run.total_steps=3", "data.train_batch_size=64", "rollout.n=2"),
        *("actor.ppo_mini_batch_size=16", "evaluation.min_accuracy=0", "checkpoint.save_freq=2"),
    ),
    "contexts": (
        *("recipes.take_notes.train", "run.total_steps=3", "data.train_batch_size=64"),
        *("evaluation.min_accuracy=0", "checkpoint.save_freq=2"),
    ),
}
PARTIAL = ("rollout.max_step_tokens=4", "algorithm.rollout_correction.rollout_is=token", "rollout.stream_groups=1")
RUNS |= {
    f"partial rollouts, {name}": (*SHORT, *PARTIAL, *others)
    for name, others in {
        "serial": ("run.schedule=serial",),
        "gather": ("run.schedule=gather",),
        "overlap, 2 actor ranks": ("run.schedule=overlap", "services.actor.num_processes=2"),
        "rollout group": GROUP,
    }.items()
}
# Their critic reads the answer, before each context.
PRIVILEGED = ("critic.privileged_prompt='{ground_truth}'", "critic.max_privileged_length=16")
RUNS |= {
    f"privileged {name}": (*RUNS[name], *PRIVILEGED, "services.critic.num_processes=2")
    for name in ("conversations", "contexts")
}
IMAGES = (
    *("recipes.read_digits.train", "run.total_steps=3", "data.train_batch_size=32", "evaluation.min_accuracy=0"),
    *("actor.ppo_mini_batch_size=16", "checkpoint.save_freq=2"),
)
RUNS |= {
    "images": IMAGES,
    "images, overlap, 2 actor ranks": (*IMAGES, "run.schedule=overlap", "services.actor.num_processes=2"),
}
VLLM = ("rollout.backend=vllm", "rollout.vllm.kv_cache_gb=0.1", "rollout.stream_groups=1", "run.schedule=serial")
VLLM_RUN = {"vllm": (*SHORT, *VLLM)}
NO_VLLM = "skipped  vllm: this environment has no vLLM (make same-weights VLLM=1 REF=... runs in one that has)"


def weights_of(tree: Path, run: tuple[str, ...], folder: Path) -> str:
    """Returns sha256 of the actor's and the critic's weights at the end of a run in `tree`."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *run, f"run.dir={folder}"]
    ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(command)} in {tree} exited with {ended.returncode}:\n{ended.stderr}")
    digests = json.loads((folder / "summary.json").read_text())["weights_sha256"]
    return " ".join(
        digest[:16] if digest else "no critic".ljust(16) for digest in (digests["actor"], digests["critic"])
    )


def keys_of(run: tuple[str, ...]) -> list[str]:
    """Returns the last name of each key that a run sets, as the pages of docs/config write them."""
    return [word.partition("=")[0].rpartition(".")[2] for word in run if "=" in word]


def main(arguments: list[str] | None = None) -> int:
    """Prints both trees' digests run by run; returns 1 if any of them differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.same_weights", description=__doc__)
    parser.add_argument("ref", help="the commit whose weights are expected")
    runs = RUNS | VLLM_RUN
    parser.add_argument("--only", nargs="+", choices=runs, metavar="RUN", help=f"some of: {', '.join(runs)}")
    options = parser.parse_args(arguments)
    has_vllm = importlib.util.find_spec("vllm") is not None
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "tree"
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(other)], check=True)
        subprocess.run(["git", "-C", str(other), "checkout", "--quiet", options.ref], check=True)
        for tree in (other, ROOT):
            subprocess.run([sys.executable, "-m", "recipes.sort_letters.prepare"], cwd=tree, check=True)
        is_same = True
        pages = "".join(page.read_text() for page in (other / "docs" / "config").glob("*.md"))
        for number, name in enumerate(options.only or (runs if has_vllm else RUNS)):
            module = runs[name][0]
            if not any(other.glob(f"{module.replace('.', '/')}*")):
                print(f"skipped  {name}: {options.ref} has no {module}", flush=True)  # noqa: T201
                continue
            if unknown := [key for key in keys_of(runs[name]) if f"{key}`" not in pages]:
                print(f"skipped  {name}: {options.ref} has no key {unknown[0]}", flush=True)  # noqa: T201
                continue
            before, now = (
                weights_of(tree, runs[name], Path(folder) / f"{number}-{which}")
                for which, tree in (("before", other), ("now", ROOT))
            )
            is_same &= before == now
            print(f"{'same' if before == now else 'DIFFERS'}  {name:26} {before}  {now}", flush=True)  # noqa: T201
    if not has_vllm:
        print(NO_VLLM)  # noqa: T201
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
