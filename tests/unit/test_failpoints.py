"""Failpoints fire in the configured process, place and step, and nowhere else."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from splitppo import failpoints
from splitppo.config import ConfigError
from splitppo.config.sections.debug import DebugConfig
from splitppo.config.worker_digest import worker_digest
from splitppo.failpoints import FOLDER, FailpointError, Failpoints, passed_mark, point_of
from tests.support.fake_services import make_config
from tests.support.groups import PROJECT, wait_until

POINT = "actor.update.mini_batch"


def debug(**failpoint: Any) -> DebugConfig:
    return DebugConfig.model_validate({"failpoints": {POINT: {"action": "raise", **failpoint}}})


def fires(points: Failpoints, step: int, point: str = "update.mini_batch") -> bool:
    try:
        points.hit(point, step)
    except FailpointError:
        return True
    return False


def test_without_failpoints_a_hit_does_nothing(tmp_path: Path) -> None:
    failpoints.arm(DebugConfig(), tmp_path, "actor")
    failpoints.hit("update.mini_batch", 1)
    assert not (tmp_path / FOLDER).exists()


def test_it_fires_at_its_hit_of_its_step_and_not_again(tmp_path: Path) -> None:
    points = Failpoints(debug(step=2, hit=2), tmp_path, "actor")
    passed = [fires(points, step) for step in (1, 1, 2, 2, 2, 3)]
    assert passed == [False, False, False, True, False, False]


def test_it_fires_in_its_process_only(tmp_path: Path) -> None:
    others = [
        Failpoints(debug(rank=1), tmp_path, "critic", 1),
        Failpoints(debug(rank=1), tmp_path, "actor", 0),
    ]
    assert not any(fires(points, 1) for points in others)
    assert fires(Failpoints(debug(rank=1), tmp_path, "actor", 1), 1)


def test_it_fires_once_per_run_folder_and_says_who_and_when(tmp_path: Path) -> None:
    assert fires(Failpoints(debug(step=2), tmp_path, "actor"), 2)
    assert not fires(Failpoints(debug(step=2), tmp_path, "actor"), 2), "a process that was started again"
    (mark,) = (tmp_path / FOLDER).iterdir()
    assert mark.name == f"{POINT}.rank0.step2.hit1.raise.fired"
    content = json.loads(mark.read_text())
    assert (content["rank"], content["step"], content["what"]) == (0, 2, "raise")


def test_the_step_of_the_work_counts_where_none_is_named(tmp_path: Path) -> None:
    failpoints.arm(debug(step=2), tmp_path, "actor")
    try:
        with failpoints.at_step(1):
            failpoints.hit("update.mini_batch")
        with failpoints.at_step(2), pytest.raises(FailpointError):
            failpoints.hit("update.mini_batch")
    finally:
        failpoints.arm(DebugConfig(), tmp_path, "actor")


def test_several_may_lie_at_one_point(tmp_path: Path) -> None:
    several = [{"step": 1, "action": "raise"}, {"step": 3, "action": "out_of_memory"}]
    points = Failpoints(DebugConfig.model_validate({"failpoints": {POINT: several}}), tmp_path, "actor")
    assert fires(points, 1)
    assert not fires(points, 2)
    with pytest.raises(MemoryError):
        points.hit("update.mini_batch", 3)


@pytest.mark.parametrize(("action", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_a_process_waits_for_another_one_and_then_meets_its_signal(
    tmp_path: Path, action: str, number: signal.Signals
) -> None:
    config = {"failpoints": {POINT: {"action": action, "after": {"point": "critic.update", "step": 3}}}}
    code = (
        "import sys, pathlib; from splitppo import failpoints; from splitppo.config.sections.debug import DebugConfig;"
        "failpoints.arm(DebugConfig.model_validate_json(sys.argv[1]), pathlib.Path(sys.argv[2]), 'actor');"
        "print('here', flush=True); failpoints.hit('update.mini_batch', 1)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(config), str(tmp_path)], cwd=PROJECT, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        assert process.poll() is None
        critic = Failpoints(DebugConfig.model_validate(config), tmp_path, "critic")
        critic.hit("update", 2)
        assert not (tmp_path / FOLDER).exists()
        critic.hit("update", 3)
        if number is signal.SIGKILL:
            assert process.wait(30) == -number
        else:
            stat = Path(f"/proc/{process.pid}/stat")
            wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", what="a stopped process")
        assert (tmp_path / FOLDER / f"{POINT}.rank0.stepany.hit1.{action}.fired").exists()
    finally:
        process.kill()
        process.wait()


def test_two_processes_that_wait_for_each_other_are_at_their_points_at_the_same_time(tmp_path: Path) -> None:
    ours, theirs = "actor.update.begin", "critic.update.begin"
    config = DebugConfig.model_validate(
        {
            "failpoints": {
                ours: {"step": 1, "action": "wait", "after": {"point": theirs, "step": 1}},
                theirs: {"step": 1, "action": "wait", "after": {"point": ours, "step": 1}},
            }
        }
    )
    actor, critic = (Failpoints(config, tmp_path, process) for process in ("actor", "critic"))
    waiting = threading.Thread(target=actor.hit, args=("update.begin", 1), daemon=True)
    waiting.start()
    wait_until((tmp_path / FOLDER / passed_mark(ours, 1)).exists, what="the actor at its point")
    assert waiting.is_alive()
    critic.hit("update.begin", 1)
    waiting.join(30)
    assert not waiting.is_alive()


def test_it_fires_again_where_its_mark_is_gone(tmp_path: Path) -> None:
    points = Failpoints(debug(step=2, hit=2), tmp_path, "actor")
    assert [fires(points, 2) for _ in range(3)] == [False, True, False]
    for mark in (tmp_path / FOLDER).iterdir():
        mark.unlink()
    assert fires(points, 2), "another run in the same folder, in processes that outlive it"


def test_who_waits_says_for_what(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="action 'wait' needs after"):
        make_config(tmp_path, debug={"failpoints": {POINT: {"action": "wait"}}})


def test_rpcs_have_their_names_in_small_letters() -> None:
    assert point_of("ComputeRefLogProbs") == "compute_ref_log_probs"
    assert point_of("Update") == "update"


def test_an_unknown_point_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown failpoint 'actor.updat' .did you mean actor.update"):
        make_config(tmp_path, debug={"failpoints": {"actor.updat": {}}})


@pytest.mark.parametrize("address", ["0.0.0.0:7000", "gpu-node:7000", "10.0.0.1:0", "[::]:1"])
@pytest.mark.parametrize("key", ["bind", "address"])
def test_failpoints_are_refused_where_others_could_reach_a_service(tmp_path: Path, key: str, address: str) -> None:
    with pytest.raises(ConfigError, match=f"expected a loopback address in services.critic.{key}"):
        make_config(tmp_path, debug={"failpoints": {POINT: {}}}, services={"critic": {key: address}})


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:7000", "[::1]:7000"])
def test_loopback_addresses_are_fine(tmp_path: Path, address: str) -> None:
    make_config(tmp_path, debug={"failpoints": {POINT: {}}}, services={"actor": {"bind": address, "address": address}})


def test_failpoints_are_no_part_of_a_workers_digest(tmp_path: Path) -> None:
    plain, with_failpoints = make_config(tmp_path), make_config(tmp_path, debug={"failpoints": {POINT: {}}})
    for role in ("actor", "critic"):
        assert worker_digest(plain, role) == worker_digest(with_failpoints, role)
