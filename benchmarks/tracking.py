"""python -m benchmarks.tracking: what a step leaves in the controller's memory, and whether late steps cost more.

The recorder with its files (metrics, samples, trace, rollouts of validations) and the display, fed with steps that no
engine has worked on: KL in the reward, six streamed parts, a validation every tenth step, a checkpoint every fifth.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from controller.ppo.experience import assemble_experience
from controller.ppo.scores import Scores, Text, objects
from controller.tracking.display import open_display
from controller.tracking.recorder import Recorder
from controller.tracking.sinks.step_files import StepFiles
from controller.validation.result import ValidationResult
from controller.workers.command import CommandReply
from splitppo.batch import Batch
from splitppo.config import Config
from splitppo.config.load import validate
from splitppo.run_folder.spans import Span
from splitppo.run_folder.summary import Accuracy
from splitppo.v1.worker_pb2 import CommandResult
from tests.support.scores import make_scores

NUM_RESPONSES = 64
NUM_PARTS = 6
STEP_S = 10.0
VALIDATION_FREQ = 10
SAVE_FREQ = 5
KIB = 1024


def main() -> None:
    """Prints the growth per step and the ratio of late to early times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    num_steps = parser.parse_args().steps
    fifth = num_steps // 5
    times_s, _ = asyncio.run(run_steps(num_steps))
    early, late = (np.median(part) * 1e3 for part in (times_s[:fifth], times_s[-fifth:]))
    tracemalloc.start()
    _, bytes_held = asyncio.run(run_steps(num_steps))
    growth = (bytes_held[-1] - bytes_held[fifth]) / (num_steps - 1 - fifth) / KIB
    print(f"{num_steps} steps")
    print(f"growth after the first fifth: {growth:.3f} KiB per step")
    print(
        f"CPU time per step: {early:.2f} ms in the first fifth, {late:.2f} ms in the last one, ratio {late / early:.2f}"
    )


async def run_steps(num_steps: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns the CPU seconds of each step, and the bytes of Python's objects after it, if they are traced."""
    times_s = np.zeros(num_steps)
    bytes_held = np.zeros(num_steps, np.int64)
    with tempfile.TemporaryDirectory("-tracking") as folder, _nowhere() as nowhere:
        config = _config(Path(folder))
        recorder = Recorder(config, [StepFiles(config, config.run.dir).receive, open_display(nowhere).receive])
        recorder.restart_at(0, [], None)
        for step in range(1, num_steps + 1):
            started_s = time.process_time()
            _record(recorder, config, step)
            times_s[step - 1] = time.process_time() - started_s
            if tracemalloc.is_tracing():
                gc.collect()
                bytes_held[step - 1] = tracemalloc.get_traced_memory()[0]
    return times_s, bytes_held


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def _config(run_dir: Path) -> Config:
    tree = {
        "run": {"dir": str(run_dir), "total_steps": 1},
        "data": {"train_files": "train.jsonl", "train_batch_size": NUM_RESPONSES},
        "actor": {"model": "policy"},
        "tracking": {"trackers": []},
    }
    return validate(tree, "the benchmark")


def _record(recorder: Recorder, config: Config, step: int) -> None:
    """Records one step as the trainer does, on a clock on which every step takes ten seconds."""
    record = recorder.begin(step)
    responses = [list(range(1 + row % 7)) for row in range(NUM_RESPONSES)]
    values = [[0.0] * len(row) for row in responses]
    rollouts = Batch.from_rows(prompts=[[1]] * NUM_RESPONSES, responses=responses, values=values)
    record.scores = _scores()
    record.experience = assemble_experience(config.algorithm, rollouts, record.scores, num_samples=1)
    start_s = step * STEP_S
    for name, place, duration_s in (("gen", 0.0, 4.0), ("ref", 4.0, 1.0), ("update_actor", 6.0, 4.0)):
        record.add_reply("actor", name, _reply(start_s + place, duration_s))
    for part in range(NUM_PARTS):
        record.add_reply("critic", "values", _reply(start_s + 1.0 + 0.5 * part, 0.4))
        record.spans.append(Span("scoring", "score", step, start_s + 1.0 + 0.5 * part, start_s + 1.3 + 0.5 * part))
    record.add_reply("critic", "update_critic", _reply(start_s + 6.0, 5.0))  # runs into the next step
    recorder.close(record)
    if step % VALIDATION_FREQ == 0:
        recorder.add_validation(step, _validation(step, start_s))
    recorder.complete_oldest()
    if step % SAVE_FREQ == 0:
        recorder.add_spans(
            [Span(role, "save_checkpoint", step, start_s, start_s + 0.5) for role in ("actor", "critic")]
        )


def _reply(started_s: float, duration_s: float) -> CommandReply:
    return CommandReply(CommandResult(), started_s, started_s + duration_s)


def _scores() -> Scores:
    rows = range(NUM_RESPONSES)
    return make_scores(
        np.arange(NUM_RESPONSES, dtype=np.float32),
        data_sources=objects("source" for _ in rows),
        texts=objects(Text(f"prompt {row}", f"response {row}", f"truth {row}") for row in rows),
    )


def _validation(step: int, start_s: float) -> ValidationResult:
    spans: Sequence[Span] = [Span("actor", "testing", step, start_s + 9.0, start_s + 9.5)]
    return ValidationResult(Accuracy(overall=0.5), {"val/accuracy": 0.5}, _scores(), {"testing": 0.5}, spans)


if __name__ == "__main__":
    main()
