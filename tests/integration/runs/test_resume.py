"""A run that stops and goes on ends like an undisturbed one, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from controller.__main__ import main as doctor
from splitppo.rpc.bearer_tokens import BearerTokens
from splitppo.rpc.credentials import PLAINTEXT, Credentials
from splitppo.rpc.errors import error_from_rpc
from splitppo.v1 import worker_pb2, worker_pb2_grpc
from tests.integration.trackers.fed_run import held_by
from tests.support.external import ExternalGroups
from tests.support.meetings import PAUSE_POINT, let_go, pause
from tests.support.runs import NUM_STEPS, STEPS_PER_EPOCH, RunFolder, started
from tests.support.user_samplers import WORST

# One test may have to make several runs first; on a busy machine they take their time.
pytestmark = pytest.mark.timeout(900)

Completed = Callable[[str, int], RunFolder]


def assert_same_end(folder: RunFolder, undisturbed: RunFolder) -> None:
    """Same weights, every step once, the validation of step 0 and the KL coefficients kept."""
    assert folder.steps == undisturbed.steps
    assert folder.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
    assert folder.summary["validation"] == undisturbed.summary["validation"]
    name = "actor/reward_kl_penalty_coeff"
    assert [line[name] for line in folder.metrics[1:]] == [line[name] for line in undisturbed.metrics[1:]]
    assert folder.summary["tokens"] == undisturbed.summary["tokens"]


@pytest.mark.extended
@pytest.mark.parametrize("trackers", [(), ("tensorboard", "wandb")], ids=["", "in trackers"])
def test_ctrl_c_finishes_the_step_at_an_epoch_boundary_and_the_run_goes_on_under_another_schedule(
    trackers: tuple[str, ...],
    completed: Completed,
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does so in its trackers, too."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = {**config, "tracking": {"trackers": [*trackers], "sample_freq": 2}}
    overlapping = {**config, "debug": {"failpoints": {PAUSE_POINT: pause(STEPS_PER_EPOCH)}}}
    with started(overlapping, tmp_path / "run", "run.schedule=overlap", "checkpoint.save_freq=-1") as first:
        first.wait_until(lambda folder: STEPS_PER_EPOCH - 1 in folder.steps, "the line of the step before")
        first.signal(signal.SIGINT)
        first.wait_until(lambda _: f"finishing step {STEPS_PER_EPOCH}" in first.output, "an answer")
        let_go(tmp_path / "run", STEPS_PER_EPOCH)
        assert first.wait() == 130, first.output
        first.wait_nothing_is_left()
    assert first.folder.summary["exit_reason"] == "interrupted"
    assert first.folder.committed_steps == first.folder.steps[-1:] == [STEPS_PER_EPOCH]
    half = shutil.copytree(first.folder.checkpoint(STEPS_PER_EPOCH), first.folder.checkpoint(STEPS_PER_EPOCH + 1))
    (half / "COMMITTED").unlink()
    with started(config, tmp_path / "run") as second:
        assert_same_end(second.complete(), completed("gather", 1))
    assert f"resumed after step {STEPS_PER_EPOCH}" in second.output
    written = [[line["step"], pytest.approx(line["critic/score/mean"])] for line in second.folder.metrics[1:]]
    for tracker in trackers:
        shown = held_by(tracker, second.folder.path)
        assert shown["steps"] == written, tracker
        assert shown["samples"] == [0, 2, 4], tracker
        assert shown["report"], tracker
        assert len({*shown.get("runs", [""])}) == 1, "one id over both starts"


def status(address: str, credentials: Credentials) -> worker_pb2.GetStatusResponse:
    with credentials.channel(address, grpc) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
        return stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=20)


def test_a_run_without_a_critic_is_closed_to_strangers_and_left_at_once_by_a_second_signal(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """Only the actor is started. Its token is the run's; a second controller is refused; a frozen rank cannot
    keep anybody from leaving.
    """
    critic_free = {
        **config,
        "algorithm": {"adv_estimator": "reinforce_plus_plus"},
        "debug": {"failpoints": {PAUSE_POINT: pause(2)}},
    }
    with started(critic_free, tmp_path / "run", "run.schedule=overlap", "checkpoint.save_freq=-1") as controller:
        controller.wait_until(lambda folder: folder.processes, "the group")
        assert {process["role"] for process in controller.folder.processes} == {"actor", "controller"}
        token_file = tmp_path / "run" / "services" / "token"
        token = token_file.read_text()
        assert token_file.stat().st_mode & 0o077 == 0
        [address] = {process["address"] for process in controller.folder.processes if process["address"]}
        assert status(address, Credentials(tokens=BearerTokens((token,)))).role == worker_pb2.ROLE_ACTOR
        with pytest.raises(grpc.RpcError) as refused:
            status(address, PLAINTEXT)
        assert str(error_from_rpc(refused.value)).startswith("actor, GetStatus: no token")
        with started(critic_free, tmp_path / "run") as another:
            assert another.wait() == 2
        assert "another controller is running" in another.output
        controller.wait_until(lambda folder: 1 in folder.steps, "the line of step 1")
        assert doctor(["doctor", "--config", str(controller.config_file)]) == 0  # found by the folder, with its token
        (rank,) = controller.folder.pids("actor")
        os.kill(rank, signal.SIGSTOP)
        controller.signal(signal.SIGINT)
        controller.wait_until(lambda _: "finishing step" in controller.output, "an answer to the first")
        controller.signal(signal.SIGINT)
        assert controller.wait() == 130, controller.output
        os.kill(rank, signal.SIGCONT)
        controller.wait_nothing_is_left()
    folder = controller.folder
    assert folder.summary["exit_reason"] == "interrupted"
    assert folder.summary["weights_sha256"]["critic"] is None
    assert folder.committed_steps == []
    assert not list((folder.path / "logs").glob("critic*"))
    files = [file for file in folder.path.rglob("*") if file.is_file()]
    assert [file for file in files if token.encode() in file.read_bytes()] == []
    assert token not in controller.output


@pytest.mark.extended
def test_a_killed_controller_leaves_no_process_and_its_run_goes_on_from_the_last_whole_checkpoint(
    completed: Completed, config: dict[str, Any], tmp_path: Path
) -> None:
    holding = {**config, "debug": {"failpoints": {PAUSE_POINT: pause(3)}}}
    with started(holding, tmp_path / "run", "checkpoint.save_freq=1") as first:
        first.wait_until(lambda folder: 2 in folder.committed_steps, "the checkpoint of step 2")
        assert len(first.folder.rank_pids) == 2
        first.process.kill()
        first.wait_nothing_is_left()
    half = shutil.copytree(first.folder.checkpoint(2), first.folder.checkpoint(3))
    (half / "COMMITTED").unlink()
    with started(config, tmp_path / "run", "checkpoint.save_freq=1") as second:
        assert_same_end(second.complete(), completed("gather", 1))
    assert "resumed after step 2" in second.output


@pytest.mark.extended
def test_killed_ranks_are_restarted_under_overlap_and_the_run_ends_the_same(
    completed: Completed, two_ranks: dict[str, Any], tmp_path: Path
) -> None:
    with started(two_ranks, tmp_path / "run", "checkpoint.save_freq=1", "run.schedule=overlap") as controller:
        for step, (role, rank) in ((1, ("actor", 1)), (3, ("critic", 0))):
            controller.wait_until(lambda folder, step=step: step in folder.steps, f"the line of step {step}")
            before = {known: controller.folder.pids(known) for known in ("actor", "critic")}
            os.kill(before[role][rank], signal.SIGKILL)
            controller.wait_until(
                lambda folder, old=before[role], role=role: not set(folder.pids(role)) & set(old), f"a new {role}"
            )
            (other,) = before.keys() - {role}
            assert controller.folder.pids(other) == before[other]
        folder = controller.complete()
    assert_same_end(folder, completed("overlap", 2))


ROWS = """
import json

def rows(data_files, data_config, split):
    with open(data_files[0]) as file:
        yield from map(json.loads, file)
"""


def test_a_killed_run_with_bypassed_old_log_probs_and_prompts_of_the_users_ends_like_an_undisturbed_one(
    groups: ExternalGroups, tmp_path: Path
) -> None:
    """Data set and sampler are classes of the user's; the sampler chooses by the scores of the steps before."""
    (tmp_path / "prompts.py").write_text(ROWS + WORST)
    settings = (
        f"data.custom_cls={{path: '{tmp_path / 'prompts.py'}', name: rows}}",
        f"data.sampler={{class_path: '{tmp_path / 'prompts.py'}', class_name: Worst}}",
        "run.total_steps=null",
        "run.total_epochs=2",
        "algorithm.rollout_correction.bypass_mode=auto",
        "checkpoint.best_metric=val/accuracy",
    )
    whole = groups.completed(tmp_path / "whole", *settings)
    groups.empty(armed=[PAUSE_POINT])
    let_go(groups.folder.path, 2)
    with groups.started(*settings) as controller:
        controller.wait_until(lambda folder: 2 in folder.committed_steps, "the checkpoint of step 2")
        controller.process.kill()
        controller.process.wait()
    let_go(groups.folder.path, 3)
    with groups.started(*settings) as controller:
        halves = controller.complete()
    assert whole.steps == list(range(NUM_STEPS + 1))
    assert_same_end(halves, whole)
    assert halves.summary["best"] == whole.summary["best"]
    assert (halves.path / "checkpoints" / "best").resolve() == halves.checkpoint(halves.summary["best"]["step"])
    for step in (0, 2, 4):
        file = f"rollouts/val/{step}.jsonl"
        assert (halves.path / file).read_bytes() == (whole.path / file).read_bytes()
    # Only the first step after a start compares them, which changes nothing that is learned.
    for folder, compared in ((whole, [1]), (halves, [1, 3])):
        assert [line["step"] for line in folder.metrics if "timing_s/old_log_prob" in line] == compared
        assert all(
            line["training/rollout_log_probs_diff_max"] < 1e-4 for line in folder.metrics if line["step"] in compared
        )
