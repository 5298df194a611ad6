"""W&B's client with a server that goes away, and a kill before all steps are uploaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitppo.machine.children.tree import kill_tree
from tests.integration.trackers.fed_run import FedRun, tracker_pids
from tests.integration.trackers.wandb_server import WandbServer
from tests.support.groups import wait_until

pytestmark = pytest.mark.extended


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    server = WandbServer()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_BASE_URL", server.address)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    yield server
    server.stop()


def test_a_server_that_was_away_has_every_step_once_it_is_back(tmp_path: Path, server: WandbServer) -> None:
    run = FedRun(tmp_path, ["wandb"])
    run.write(0, 1)
    wait_until(lambda: run.sent_step("wandb") == 1, 60.0, "step 1")
    server.stop()
    run.write(2, 3)
    wait_until(lambda: run.sent_step("wandb") == 3, 60.0, "step 3, which the client keeps")
    server.start()
    run.end()
    assert server.steps == [0, 1, 2, 3]
    assert server.exit_codes == [0]


def test_steps_that_a_killed_client_had_not_uploaded_are_sent_again(tmp_path: Path, server: WandbServer) -> None:
    run = FedRun(tmp_path, ["wandb"])
    run.write(0, 1, 2)
    wait_until(lambda: run.sent_step("wandb") == 2, 60.0, "step 2")
    [pid] = tracker_pids()
    kill_tree(pid)
    assert server.steps != [0, 1, 2]
    run.write(3)
    run.end()
    assert server.steps == [0, 1, 2, 3]
