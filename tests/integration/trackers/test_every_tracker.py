"""The same run in each tracker, read back by its own client; MLflow's server is killed in between."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controller.__main__ import main
from tests.integration.trackers.fed_run import FedRun, scores
from tests.support.groups import PROJECT, wait_until

PYTHON = PROJECT / ".venv-trackers" / "bin" / "python"
ALL = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-trackers: make test-trackers"),
]


def free_port() -> int:
    """A port that nobody listens to now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class MlflowServer:
    """A tracking server on SQLite, its files in a folder; may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self.address = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        storage = ["--backend-store-uri", "sqlite:///mlflow.db", "--artifacts-destination", "files"]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(PYTHON), "-m", "mlflow", "server", "--port", str(self._port), "--workers", "1", *storage],
                cwd=self._folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self._answers, 240.0, "MLflow's server")

    def kill(self) -> None:
        """Kills the server and all that it has started."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=5.0) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False


@contextmanager
def _mlflow(folder: Path) -> Iterator[MlflowServer]:
    folder.mkdir()
    server = MlflowServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with _mlflow(tmp_path_factory.mktemp("mlflow") / "server") as server:
        yield server


@pytest.fixture(autouse=True)
def clients(tmp_path: Path, mlflow: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of the clients: nothing leaves this machine."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.address)


def test_a_resumed_run_is_the_same_in_every_tracker_and_each_has_every_step_once(tmp_path: Path) -> None:
    run = FedRun(tmp_path / "run", ALL, python=PYTHON, flush_timeout_s=240.0)
    run.write(0, 1, 2, 3)
    for tracker in ALL:
        wait_until(lambda tracker=tracker: run.sent_step(tracker) == 3, 240.0, f"step 3 in {tracker}")
    run.end("interrupted")
    run.start(1)
    run.write(2, 3, 4, 5, offset=0.5)  # steps 2 and 3 are repeated
    run.end()
    contents = {tracker: run.held_by(tracker) for tracker in ALL}
    for tracker in ("wandb", "mlflow", "swanlab", "trackio"):
        assert contents[tracker]["steps"] == scores(0, 1, 2, 3) + scores(4, 5, offset=0.5), tracker
        assert contents[tracker]["name"].startswith("proof"), tracker
        assert contents[tracker]["project"] == "proofs", tracker
    assert contents["tensorboard"]["steps"] == scores(0, 1) + scores(2, 3, 4, 5, offset=0.5)
    for tracker in ALL:
        assert contents[tracker]["samples"] == [0, 2, 4], tracker
        assert contents[tracker]["report"], tracker
    assert {contents[tracker]["config"] for tracker in ("wandb", "mlflow", "trackio")} == {"proof"}
    for tracker in ("wandb", "swanlab"):
        assert len(contents[tracker]["runs"]) == 2
        assert len({*contents[tracker]["runs"]}) == 1, "one id over all starts"
    assert contents["mlflow"]["ends"] == ["FINISHED"]


def test_a_server_that_is_killed_in_mid_run_lacks_nothing_once_it_is_back(
    tmp_path: Path, mlflow: MlflowServer, caplog: pytest.LogCaptureFixture
) -> None:
    run = FedRun(tmp_path / "run", ["mlflow"], python=PYTHON, flush_timeout_s=240.0)
    run.write(0, 1, 2)
    wait_until(lambda: run.sent_step("mlflow") == 2, 240.0, "step 2")
    mlflow.kill()
    run.write(3, 4)
    wait_until(lambda: "the run goes on, and missing steps are sent later" in caplog.text, 120.0, "a warning")
    assert run.sent_step("mlflow") == 2
    mlflow.start()
    run.write(5)
    run.end()
    assert run.held_by("mlflow")["steps"] == scores(0, 1, 2, 3, 4, 5)
    assert caplog.text.count("the run goes on") == 1


def test_what_a_run_could_not_send_before_its_end_is_sent_by_sync(
    tmp_path: Path, mlflow: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as away:
        away.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
        run = FedRun(tmp_path / "run", ["mlflow"], python=PYTHON, flush_timeout_s=0.5)
        run.write(0, 1)
        run.end()
    assert run.sent_step("mlflow") == -1
    assert main(["sync", str(run.folder)]) == 0
    assert run.held_by("mlflow")["steps"] == scores(0, 1)
