"""A user's reward function that fails in every way, and helpers for its tests."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from rewards.code.tree import children_of
from rewards.samples import Failure, Sample, Scored
from splitppo.config import RewardConfig

# A user's file; the response selects the way in which it fails.
TROUBLE = """
import enum, os, re, signal, sys, time

class Stage(enum.IntEnum):
    LAST = 2

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if "marker" in extra_info:
        open(extra_info["marker"], "w").close()
    if solution_str == "hang":
        while True:
            time.sleep(1)
    if solution_str == "hang in native code":
        re.match(r"(a+)+$", "a" * 64 + "b")
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if solution_str == "raise":
        raise RuntimeError("no such sandbox")
    if solution_str == "sys.exit":
        sys.exit("bye")
    if solution_str == "nan":
        return float("nan")
    if solution_str == "none":
        return None
    if solution_str == "text":
        return "0.5"
    if solution_str == "dict":
        return {"score": 2, "acc": True, "pred": "x", "shape": (1, 2)}
    if solution_str == "dict without score":
        return {"acc": 1.0}
    if solution_str == "list":
        return [1.0]
    if solution_str == "huge":
        return 1e39
    if solution_str == "kind of its own":
        return {"score": 1, "stage": Stage.LAST, "text": "x" * 10_000_000}
    if solution_str == "pid":
        return os.getpid()
    if solution_str == "fork":
        os.fork()
        return 2
    if solution_str == "child":
        return os.fork() or time.sleep(600)
    return float(solution_str == ground_truth)
"""


def samples(*responses: str) -> list[Sample]:
    return [Sample("mine", response, "good", {"points": index}) for index, response in enumerate(responses)]


def scores(result: list[Scored]) -> list[float]:
    return [scored.score for scored in result]


def failures(result: list[Scored]) -> Counter[Failure]:
    return Counter(scored.failure for scored in result if scored.failure)


def config(path: Path, **keys: object) -> RewardConfig:
    return RewardConfig.model_validate({"custom_function_path": path, "timeout_s": 60.0, "num_workers": 1, **keys})


def write(folder: Path, text: str) -> Path:
    path = folder / "my_reward.py"
    path.write_text(text, encoding="utf-8")
    return path


# The time limit for functions that hang: long enough for a good call on a busy machine.
HANG_LIMIT_S = 2.0


def scoring_processes() -> list[int]:
    """Returns the scoring processes that this process has started and that have not ended."""
    commands = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children_of(os.getpid())}
    return [child for child, command in commands.items() if b"rewards.scoring_process" in command]
