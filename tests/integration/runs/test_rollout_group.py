"""A rollout group samples what the actor would, and nothing that happens to it changes the weights of a run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller.workers.clients import Caller, RolloutClient
from splitppo.config.load import load_config
from splitppo.rpc.credentials import load_credentials
from splitppo.rpc.errors import StaleEpoch
from splitppo.run_folder.epoch import read_epoch
from tests.kill_matrix.cells import Cell
from tests.kill_matrix.harness import run_cells, with_incidents
from tests.support.external import ExternalGroups
from tests.support.runs import EACH_STEP, RUN_TIMEOUT_S, STALE, RunFolder, started

pytestmark = pytest.mark.timeout(900)

GROUP = {"num_processes": 1, "threads": 1}
# The critic works on what the group has handed on, when the group dies.
STREAMING = Cell(
    "rollout_0",
    "streaming",
    "rollout.generate.part",
    settings={"after": {"point": "critic.compute_values", "step": 2}},
)
IN_SYNC = Cell("rollout_0", "sync_half", "rollout.sync_weights")
PUBLISHING = Cell("actor_0", "publish_half", "actor.publish_weights", step=3, settings={"hit": 5})


def test_a_run_whose_group_and_actor_are_lost_ends_as_an_undisturbed_run_without_a_group(
    config: dict[str, Any], completed: Callable[[str, int], RunFolder], tmp_path: Path
) -> None:
    with_group = {**config, "services": {**config["services"], "rollout": GROUP}}
    verdict = run_cells([STREAMING, IN_SYNC, PUBLISHING], with_incidents(with_group), tmp_path / "run")
    assert verdict.failures(completed("gather", 1).summary["weights_sha256"]) == []
    log = verdict.folder.log("controller_0")
    assert log.count("starting the rollout group again in ") == 2
    assert log.count("recovering in ") == log.count("back to the checkpoint of step ") == 1
    assert verdict.folder.metrics[-1]["recovery/num_restarts"] == 3
    [recovered] = [event for event in verdict.folder.events if event["kind"] == "recovered"]
    assert recovered["from_step"] == PUBLISHING.step
    assert recovered["to_step"] in (1, 2)  # the newest checkpoint that was complete by then
    assert f"step {recovered['to_step']}; steps made again: {PUBLISHING.step - recovered['to_step']}" in log
    causes = [event["cause"] for event in verdict.folder.events if event["kind"] == "group_lost"]
    assert [cause.rpartition("; ")[2] for cause in causes] == [
        *("rollout rank 0 was ended by SIGKILL", "rollout rank 0 was ended by SIGKILL"),
        "actor rank 0 was ended by SIGKILL",
    ]
    assert verdict.folder.summary["this_start"]["resumed_at_step"] == 0
    syncs = {span["step"] for span in verdict.folder.spans() if (span["pool"], span["name"]) == ("rollout", "sync")}
    assert syncs >= {*verdict.folder.steps}


@pytest.mark.extended
def test_a_group_that_ends_before_the_handshake_is_started_again_at_once(
    config: dict[str, Any], completed: Callable[[str, int], RunFolder], tmp_path: Path
) -> None:
    services = {**config["services"], "rollout": GROUP, "start_timeout_s": 2 * RUN_TIMEOUT_S}
    killed = {"failpoints": {"rollout.generate": {"step": 3}}}
    known: list[int] = []

    def kill_a_new_rank(folder: RunFolder) -> bool:
        with contextlib.suppress(FileNotFoundError, ValueError):  # the file is being replaced
            [rank] = json.loads((folder.path / "services" / "rollout.json").read_text())["processes"]
            if rank["pid"] not in known:
                os.kill(rank["pid"], signal.SIGKILL)
                known.append(rank["pid"])
                return True
        return False

    with started({**config, "services": services, "debug": killed}, tmp_path / "run") as controller:
        controller.wait_until(kill_a_new_rank, "the first start")
        known += controller.wait_until(lambda folder: folder.pids("rollout"), "the second start")
        controller.wait_until(kill_a_new_rank, "the start after the kill in step 3")
        controller.complete()
    assert controller.folder.summary["weights_sha256"] == completed("gather", 1).summary["weights_sha256"]
    assert controller.output.count("recovering in ") == 1
    assert controller.output.count("starting the rollout group again in ") == 2


def test_a_second_signal_leaves_no_published_weights(config: dict[str, Any], tmp_path: Path) -> None:
    with_group = {**config, "services": {**config["services"], "rollout": GROUP}}
    stopped = {"failpoints": {"rollout.generate": {"step": 2, "action": "stop"}}}
    shared = tmp_path / "shared"
    with started(
        {**with_group, "debug": stopped},
        tmp_path / "run",
        "algorithm.adv_estimator=reinforce_plus_plus",  # without a critic
        "evaluation.test_freq=-1",
        f"rollout.sync_dir={shared}",
    ) as controller:
        controller.wait_until(lambda _: [*shared.glob("splitppo-*/version_1")], "the weights of step 1")
        for _ in range(2):
            controller.signal(signal.SIGINT)
            controller.wait_until(lambda _: "finishing step" in controller.output, "an answer to the first")
        assert controller.wait() == 130, controller.output
    assert not any(shared.iterdir())


async def test_a_controller_killed_while_the_group_samples_ahead_is_replaced_and_the_old_one_is_refused(
    stale: RunFolder, groups: ExternalGroups
) -> None:
    folder, options = groups.folder, (*STALE, EACH_STEP)
    # The group samples the responses of step 4, beside the update of step 3.
    killed = {"failpoints": {"controller.rollout.generate": {"step": 4}}}
    with groups.with_rollout_group() as group:
        with started({**groups.config, "debug": killed}, folder.path, *options) as first:
            assert first.wait() == -9, first.output
        assert folder.committed_steps in ([1], [1, 2])
        with groups.started(*options) as second:
            second.complete()
        assert "resumed after step " in second.output
        assert "has no rollouts yet" not in second.output
        assert folder.summary["weights_sha256"] == stale.summary["weights_sha256"]
        assert {process["instance_id"] for process in folder.processes if process["role"] != "controller"} == {
            *groups.instance_ids,
            group.instance_id,
        }

        run_id, epoch = read_epoch(folder.path / "controller.epoch")
        credentials = load_credentials(load_config(second.config_file).services.security, "controller")
        old = RolloutClient(group.address, Caller(run_id, epoch - 1), credentials=credentials)
        with pytest.raises(StaleEpoch):
            await old.sync_weights(2, "0" * 64)
        await old.close()
