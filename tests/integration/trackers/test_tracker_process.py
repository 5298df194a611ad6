"""The tracker process of a run: real clients, killed processes, clients that hang, mistakes of the user."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from controller.__main__ import main
from controller.run.folder import RunFolder
from controller.tracking.trackers.process import check_trackers, start
from controller.tracking.trackers.protocol import Run
from splitppo.config import ConfigError
from splitppo.config.sections.tracking import TrackingConfig
from tests.integration.trackers.fed_run import FedRun, scores, tracker_pids
from tests.support.fake_services import make_config
from tests.support.groups import is_alive, wait_until

HANGING_CLIENT = """
import time
class Settings:
    def __init__(self, **settings): pass
def init(**arguments):
    time.sleep(600)
"""


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """A Python without any package."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return python


def test_a_resumed_run_is_one_run_in_tensorboard_and_wandb_with_every_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = FedRun(tmp_path / "run", ["tensorboard", "wandb"])
    run.write(0, 1, 2, 3)
    wait_until(lambda: run.sent_step("wandb") == 3, 60.0, "step 3")
    run.end("interrupted")
    run.start(1)
    run.write(2, 3, 4, 5, offset=0.5)  # steps 2 and 3 are repeated
    run.end()
    wandb = run.held_by("wandb")
    assert wandb == {
        "runs": [run.id] * 2,
        "name": "proof",
        "project": "proofs",
        "config": "proof",
        "steps": scores(0, 1, 2, 3) + scores(4, 5, offset=0.5),
        "samples": [0, 2, 4],
        "report": True,
        "ends": [0, 0],
    }
    assert run.held_by("tensorboard") == {
        "steps": scores(0, 1) + scores(2, 3, 4, 5, offset=0.5),  # as metrics.jsonl has them
        "samples": [0, 2, 4],
        "report": True,
    }
    # Whoever did not name a tracker at first sends it the whole run afterwards.
    (run.folder / "trackers" / "tensorboard.json").unlink()
    assert main(["sync", str(run.folder), "--to", "tensorboard"]) == 0
    assert run.held_by("tensorboard")["steps"] == scores(0, 1) + scores(2, 3, 4, 5, offset=0.5)


def test_a_killed_tracker_process_is_started_again_and_nothing_lacks_or_comes_twice(tmp_path: Path) -> None:
    run = FedRun(tmp_path, ["tensorboard"])
    run.write(0, 1)
    wait_until(lambda: run.sent_step("tensorboard") == 1, 60.0, "step 1")
    kill_tracker_process()
    run.write(2)

    def is_sent() -> bool:
        run.process.wake()
        return run.sent_step("tensorboard") == 2

    wait_until(is_sent, 60.0, "step 2, by another process")
    kill_tracker_process()
    run.write(3)
    run.end()
    assert run.held_by("tensorboard")["steps"] == scores(0, 1, 2, 3)


def kill_tracker_process() -> None:
    [pid] = tracker_pids()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), 10.0, "its end")


def test_a_client_that_hangs_costs_the_end_of_the_run_no_more_than_the_flush_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "wandb.py").write_text(HANGING_CLIENT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'clients'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    run = FedRun(tmp_path / "run", ["wandb", "tensorboard"], flush_timeout_s=1.0)
    run.write(0, 1)
    wait_until(lambda: run.sent_step("tensorboard") == 1, 60.0, "the other tracker, which hears of nothing")
    assert run.sent_step("wandb") == -1
    started_s = time.monotonic()
    run.end()
    assert time.monotonic() - started_s < 60.0  # the client would have taken ten minutes
    assert tracker_pids() == []


@pytest.mark.timeout(60)
def test_a_tracker_process_that_reads_nothing_keeps_nobody_waiting(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    config = TrackingConfig(trackers=["tensorboard"], python=str(python))
    long = Run("1" * 16, "a run", "a project", tmp_path, {"data": {"train_files": ["x" * 1000] * 1000}})
    (tmp_path / "logs").mkdir()
    with start(config, long) as process:
        process.kill()


def test_only_one_process_at_a_time_feeds_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = FedRun(tmp_path, ["tensorboard"])
    run.write(0)
    wait_until(lambda: run.sent_step("tensorboard") == 0, 60.0, "step 0")
    assert main(["sync", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: its trackers are being fed by another process\n"
    run.end()


# Mistakes, told before anything starts.


@pytest.mark.parametrize(
    ("tracker", "remedy"),
    [
        ("tensorboard", "pip install tensorboard"),
        ("wandb", "pip install 'splitppo[wandb]'"),
        ("mlflow", "pip install 'splitppo[mlflow]'"),
        ("swanlab", "pip install swanlab pillow in a Python of its own, which tracking.python names"),
        ("trackio", "pip install 'splitppo[trackio]'"),
    ],
)
def test_a_tracker_without_its_package_is_refused_with_what_to_install(
    tmp_path: Path, bare_python: Path, tracker: str, remedy: str
) -> None:
    config = make_config(tmp_path, tracking__trackers=[tracker], tracking__python=str(bare_python))
    with pytest.raises(ConfigError) as refused:
        check_trackers(config.tracking)
    assert str(refused.value).startswith(f"tracking.trackers: {tracker} needs {tracker}")
    assert str(refused.value).endswith(remedy)


def test_wandb_is_refused_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    tracking = make_config(tmp_path, tracking__trackers=["wandb"]).tracking
    with pytest.raises(ConfigError, match="wandb has no API key: set WANDB_API_KEY, call `wandb login`, or set WAND"):
        check_trackers(tracking)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    check_trackers(tracking)


def test_a_python_that_is_none_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, tracking__trackers=["tensorboard"], tracking__python=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"tracking.python: cannot be started: .*none"):
        check_trackers(config.tracking)


@pytest.mark.parametrize(
    ("trackers", "sentence"),
    [
        (["console"], "should be 'tensorboard', 'wandb', 'mlflow', 'swanlab' or 'trackio', got 'console'"),
        (["wandb", "wandb"], "expected each tracker once, got ['wandb', 'wandb']"),
    ],
)
def test_unknown_and_repeated_trackers_are_refused(tmp_path: Path, trackers: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_config(tmp_path, tracking__trackers=trackers)
    assert sentence in str(refused.value)


def test_steps_that_cannot_all_be_read_are_not_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunFolder(make_config(tmp_path)):
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    assert main(["sync", str(tmp_path)]) == 2
    assert re.fullmatch(r"error: .*/metrics\.jsonl, line 2: not valid JSON: .*\n", capsys.readouterr().err)


def test_what_is_no_run_folder_cannot_be_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sync", str(tmp_path)]) == 2
    assert "is no run folder: expected config.yaml and controller.epoch in it" in capsys.readouterr().err
