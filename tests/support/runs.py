"""Real runs for tests: `python -m controller` in a process of its own, on tiny models, and the files of a run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from tests.support import models
from tests.support.groups import ONE_THREAD, PROJECT, is_alive, wait_until
from tests.support.seeds import shifted

RUN_TIMEOUT_S = 240.0
_MARK = "SPLITPPO_TEST_RUN"  # in the environment of all that a controller starts
NUM_STEPS = 4
STEPS_PER_EPOCH = 2
# A run that is stopped half way saves in each step, and has saved these steps.
EACH_STEP = "checkpoint.save_freq=1"
SAVED = [1, 2, 3]
# A run whose steps learn from rollouts of older weights.
STALE = ("rollout.staleness=1", "rollout.stream_groups=1", "algorithm.rollout_correction.rollout_is=token")
# A run whose steps sample five tokens of each response, which may have sixteen.
_WITH_CORRECTION = ("rollout.stream_groups=1", "algorithm.rollout_correction.rollout_is=token")
PARTIAL = ("rollout.max_step_tokens=5", *_WITH_CORRECTION)
# What differs in nothing: responses are never cut, and drawn for one step.
WHOLE = ("rollout.max_step_tokens=16", "rollout.overcommit=1.0", *_WITH_CORRECTION)
UNCUT = _WITH_CORRECTION
# The steps of a run on two actor ranks, long enough for several incidents one after the other.
NUM_LONG_STEPS = 13

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(letter in ground_truth for letter in solution_str) / 16
"""


@dataclass(frozen=True)
class Inputs:
    """The inputs of every run in the tests: models, prompts, a reward function."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Inputs:
        """Writes a policy, a teacher, a value model, a reward model, 16 training and 8 validation prompts, a reward."""
        models.save_policy(folder / "policy")
        models.save_policy(folder / "teacher", seed=3)
        models.save_value_model(folder / "value")
        models.save_reward_model(folder / "reward")
        draws = random.Random(shifted(0))
        for name, num_rows in (("train", 16), ("val", 8)):
            rows = [_row("".join(draws.sample("abcdefghij", 4))) for _ in range(num_rows)]
            (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (folder / "reward.py").write_text(REWARD)
        return cls(folder)

    def config(self) -> dict[str, Any]:
        """Returns the configuration of a run without its folder.

        The run has 4 steps, 2 epochs and several mini-batches, and is streamed. Its first step trains the critic only.
        """
        return {
            "run": {"total_steps": NUM_STEPS},
            "data": {
                "train_files": str(self.folder / "train.jsonl"),
                "val_files": str(self.folder / "val.jsonl"),
                "train_batch_size": 16 // STEPS_PER_EPOCH,
                "max_prompt_length": 32,
                "max_response_length": 16,
            },
            # All rows of the first group of prompts begin before any row of the second group.
            "rollout": {"n": 4, "stream_groups": 2, "max_batch_size": 8},
            "placement": {"reference": "actor"},  # whatever a run streams on the same groups
            "algorithm": {
                "lam": 0.95,
                "use_kl_in_reward": True,
                "kl_ctrl": "adaptive",
                "kl_coef": 0.05,
                "kl_target": 0.001,
                "kl_horizon": 200,
                # The actor has a call of its own for the old log-probs, in which it can be killed.
                "rollout_correction": {"bypass_mode": False},
            },
            "actor": {"model": str(self.folder / "policy"), "lr": 1e-3, "ppo_mini_batch_size": 4},
            "critic": {"model": str(self.folder / "value"), "lr": 1e-3, "ppo_epochs": 2, "warmup_steps": 1},
            "reward": {"custom_function_path": str(self.folder / "reward.py")},
            "evaluation": {"test_freq": 2},
            "checkpoint": {"save_freq": 2, "keep": 20},
            "tracking": {"trackers": [], "report": False},  # which others test, and which take each run 3 s
            "services": {"start_timeout_s": 120.0},
        }


def _row(letters: str) -> dict[str, Any]:
    return {
        "prompt": f"sort {letters}",
        "data_source": "letters",
        "reward_model": {"style": "rule", "ground_truth": letters},
    }


@dataclass(frozen=True)
class RunFolder:
    """The files of a run, read as a script would read them."""

    path: Path

    @property
    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return content

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The complete lines of metrics.jsonl, parsed."""
        file = self.path / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The lines of events.jsonl."""
        return [json.loads(line) for line in (self.path / "events.jsonl").read_text().splitlines()]

    @property
    def steps(self) -> list[int]:
        """The step of every line of metrics.jsonl, in the order of the file."""
        return [line["step"] for line in self.metrics]

    @property
    def processes(self) -> list[dict[str, Any]]:
        """The content of processes.json; empty before the groups answer."""
        file = self.path / "processes.json"
        return json.loads(file.read_text()) if file.exists() else []

    def pids(self, role: str) -> list[int]:
        """Returns the pids of the ranks of a role, by rank."""
        ranks = [process for process in self.processes if process["role"] == role]
        return [process["pid"] for process in sorted(ranks, key=itemgetter("rank"))]

    @property
    def rank_pids(self) -> list[int]:
        """The pids of all ranks of all groups."""
        return [process["pid"] for process in self.processes if process["role"] != "controller"]

    @property
    def committed_steps(self) -> list[int]:
        """The steps with a complete checkpoint."""
        markers = (self.path / "checkpoints").glob("global_step_*/COMMITTED")
        return sorted(int(marker.parent.name.removeprefix("global_step_")) for marker in markers)

    def checkpoint(self, step: int) -> Path:
        """Returns the folder of the checkpoint of a step."""
        return self.path / "checkpoints" / f"global_step_{step}"

    def log(self, name: str) -> str:
        """Returns the text of a file in logs/; empty if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return (self.path / "logs" / f"{name}.log").read_text()
        return ""

    def spans(self) -> list[dict[str, Any]]:
        """The spans of trace.json: pool, name, step, and start and end in microseconds."""
        events = json.loads((self.path / "trace.json").read_text())
        return [
            {
                "pool": event["cat"],
                "name": event["name"],
                "step": event["args"]["step"],
                "start": event["ts"],
                "end": event["ts"] + event["dur"],
            }
            for event in events
            if event["ph"] == "X"
        ]


class Controller:
    """A `python -m controller` process in a session of its own, so that it gets only the signals of the test.

    Args:
        config: the tree of the configuration; its run.dir is set to `folder`.
        folder: the run folder.
        overrides: key.path=value arguments.
        module: what `python -m` runs.
        prefix: the words before the command, e.g. those that enter a network namespace.
        devices: the GPUs that it sees, as CUDA_VISIBLE_DEVICES names them.
        beside: the folder for the configuration and the output; by default the one that holds the run folder.
    """

    def __init__(
        self,
        config: dict[str, Any],
        folder: Path,
        *overrides: str,
        module: str = "controller",
        beside: Path | None = None,
        prefix: Sequence[str] = (),
        devices: str = "",
    ) -> None:
        self.folder = RunFolder(folder)
        self._mark = secrets.token_hex(8)
        beside = beside or folder.parent
        beside.mkdir(parents=True, exist_ok=True)
        self.config_file = beside / f"{folder.name}-{self._mark}.yaml"
        self.config_file.write_text(yaml.safe_dump({**config, "run": {**config["run"], "dir": str(folder)}}))
        self.output_file = self.config_file.with_suffix(".out")
        with self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", module, "--config", str(self.config_file), *ONE_THREAD, *overrides],
                cwd=PROJECT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": devices, _MARK: self._mark},
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """The output so far."""
        return self.output_file.read_text(errors="replace")

    @property
    def errors(self) -> list[str]:
        """The errors for the user, one sentence each."""
        return [line for line in self.output.splitlines() if line.startswith("error: ")]

    def wait_until(self, condition: Callable[[RunFolder], Any], what: str) -> Any:
        """Polls until `condition(folder)` is true, and returns its value; fails at once if the run ends before."""

        def holds() -> Any:
            ended = self.process.poll() is not None
            if not (value := condition(self.folder)) and ended:
                raise AssertionError(f"{what}: the run ended before, exit {self.process.returncode}:\n{self.output}")
            return value

        return wait_until(holds, RUN_TIMEOUT_S, what)

    def wait(self) -> int:
        """Waits until the controller has ended; returns its exit status."""
        return self.process.wait(RUN_TIMEOUT_S)

    def complete(self) -> RunFolder:
        """Waits until the run is completed; fails if it ends in another way."""
        assert self.wait() == 0, self.output
        assert self.folder.summary["exit_reason"] == "completed"
        return self.folder

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the controller's process group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def processes(self) -> list[int]:
        """Returns the pids of the controller and of all that it has started and that still run, whatever the parent."""
        mark = f"{_MARK}={self._mark}".encode()
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if mark in _environment_of(pid)]

    def wait_nothing_is_left(self) -> None:
        """Waits until all processes that this controller has started have ended; fails if one stays."""
        wait_until(lambda: not self.processes(), 30.0, f"the end of the processes of {self.folder.path}")

    def stop(self) -> None:
        """Ends the controller at once if it still runs, then waits until all that it has started ends by itself."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        try:
            self.wait_nothing_is_left()
        finally:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def started(config: dict[str, Any], folder: Path, *overrides: str, **options: Any) -> Iterator[Controller]:
    """Starts a controller, and ends it afterwards, whatever happens in the test."""
    controller = Controller(config, folder, *overrides, **options)
    try:
        yield controller
    finally:
        controller.stop()


def _environment_of(pid: int) -> list[bytes]:
    """Returns the environment of a living process; empty for any other."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if is_alive(pid) else []
    except OSError:
        return []
