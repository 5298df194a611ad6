"""A group of two ranks: rows go out and come back in order; a rank or the launcher dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitppo.machine.children.tree import find_processes
from splitppo.rpc.errors import DataLoss, OutOfMemory, PeerDied
from splitppo.run_folder.end_reason import read_end_reason
from tests.integration.runtime import toy
from tests.integration.runtime.client import Client, error_of, experience, progress, result
from tests.integration.runtime.conftest import MODULE, StartToy, Toy, write_config
from tests.support.checkpoints import DAMAGES
from tests.support.groups import PROJECT, Group, is_alive, wait_until
from tests.support.ports import is_loopback, listening
from tests.support.seeds import shifted

GENERATOR = np.random.default_rng(shifted(1))
PROMPTS = [[int(token) for token in GENERATOR.integers(1, 9, length)] for length in GENERATOR.integers(1, 40, 23)]
RESPONSES = [[int(token) for token in GENERATOR.integers(1, 9, length)] for length in GENERATOR.integers(1, 90, 23)]
RETURNS = [[1.0] * len(response) for response in RESPONSES]


@pytest.fixture(scope="module")
def two(start_module_toy: StartToy) -> Toy:
    toy = start_module_toy(2)
    toy.client.put(experience(1), prompts=PROMPTS, responses=RESPONSES, returns=RETURNS)
    return toy


@pytest.mark.promise("one open port")
def test_no_port_is_open_but_the_services_own(two: Toy) -> None:
    """The ranks' store, gloo and torchrun itself listen where only this machine is heard."""
    processes = [two.group.process.pid, *two.group.pids]
    [service] = {address for address in listening(processes) if address.endswith(f":{two.group.port}")}
    others = listening(processes) - {service}
    assert others, "ranks speak to each other over loopback"
    assert all(map(is_loopback, others)), others


def test_results_of_two_ranks_are_in_the_order_of_the_rows(two: Toy) -> None:
    result(two.client.compute_values(experience(1), base_step=0))
    values = two.client.get(experience(1), "values")["values"]
    assert values.values.tolist() == toy.values_of(PROMPTS, RESPONSES).values.tolist()


def test_each_rank_holds_40_to_60_percent_of_the_tokens(two: Toy) -> None:
    reply = result(two.client.compute_values(experience(1), base_step=0))
    assert 0.4 <= reply.metrics["token_share"] <= 0.6


def test_a_request_of_any_length_reaches_every_rank(two: Toy) -> None:
    """Longer than what the 512-byte header holds inline."""
    request = toy.critic_pb2.ComputeValuesRequest(header=two.client.header(0, "x" * 256), slot=experience(1))
    request.header.run_id = two.client.run_id
    assert result(two.client.critic.ComputeValues(request, timeout=60)).committed_step == 0


def test_two_ranks_update_save_and_load_together(two: Toy) -> None:
    client = two.client
    assert result(client.update(1)).metrics["total"] == sum(map(len, RESPONSES))
    weights = client.digest(1)
    result(client.save(1))
    result(client.load(0, base_step=1))
    assert client.digest(0) != weights
    result(client.load(1, base_step=0))
    assert client.digest(1) == weights


@pytest.mark.parametrize("damage", DAMAGES)
def test_two_ranks_go_on_after_a_damaged_checkpoint_was_refused(two: Toy, damage: Callable[[Path], None]) -> None:
    client, step = two.client, two.client.status().committed_step + 1
    client.put(experience(step), prompts=PROMPTS, responses=RESPONSES, returns=RETURNS)
    result(client.update(step))
    weights = client.digest(step)
    result(client.save(step))
    file = two.run_dir / "checkpoints" / f"global_step_{step}" / "critic" / "weights"
    damage(file)
    refusal = error_of(client.load(step, base_step=step))
    assert isinstance(refusal, DataLoss)
    assert f"{file}: expected " in refusal.message
    assert client.digest(step) == weights


def test_out_of_memory_before_the_other_rank_hears_of_the_command_is_refused_and_the_group_goes_on(two: Toy) -> None:
    client, step = two.client, two.client.status().committed_step + 1
    rows = {"responses": RESPONSES, "returns": RETURNS}
    client.put(experience(step), prompts=[[toy.NO_MEMORY_TO_PREPARE], *PROMPTS[1:]], **rows)
    refusal = error_of(client.update(step))
    assert isinstance(refusal, OutOfMemory)
    assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    client.put(experience(step), prompts=PROMPTS, **rows)
    assert result(client.update(step)).committed_step == step


def test_sigterm_drains_both_ranks_after_the_running_command(two: Toy) -> None:
    """Last of those that share the group: it ends here."""
    client, step = two.client, two.client.status().committed_step + 1
    client.put(experience(step), prompts=[[toy.BLOCK], [1]], responses=[[1], [2]], returns=[[1.0], [1.0]])
    running = client.update(step)
    assert progress(running).phase == "blocked"
    queued = client.compute_values(experience(step), base_step=step - 1)
    wait_until(lambda: client.status().queued_commands == 1, what="a command queued")
    two.group.process.send_signal(signal.SIGTERM)
    assert error_of(queued).code == grpc.StatusCode.UNAVAILABLE
    health = health_pb2_grpc.HealthStub(client.channel)
    assert (
        health.Check(health_pb2.HealthCheckRequest(service="splitppo.v1.CriticService"), timeout=10).status
        == health_pb2.HealthCheckResponse.NOT_SERVING
    )
    assert error_of(client.compute_values(experience(step), base_step=step - 1)).code == grpc.StatusCode.UNAVAILABLE
    (two.run_dir / "go").touch()
    assert result(running).committed_step == step
    two.group.wait_ended()
    assert not two.group.announcement.exists()
    for rank in range(2):
        assert "leaving" in (two.run_dir / "logs" / f"critic_{rank}.log").read_text().splitlines()[-1]


def put_order(client: Client, order: int) -> None:
    client.put(experience(1), prompts=[[order], [order]], responses=[[1], [2]], returns=[[1.0], [1.0]])


def test_an_error_on_one_rank_names_it_and_ends_the_group(start_toy: StartToy) -> None:
    broken = start_toy(2)
    put_order(broken.client, toy.RAISE_ON_RANK + 1)
    error = error_of(broken.client.update(1))
    assert isinstance(error, PeerDied)
    assert error.place.rank == 1
    assert "rank 1 failed in step 1, Update (forward): RuntimeError: a toy has broken" in str(error)
    assert broken.group.wait_ended() != 0
    assert "a toy has broken" in (broken.run_dir / "logs" / "critic_1.log").read_text()
    assert not broken.group.announcement.exists()


@pytest.mark.parametrize(
    "ranks", [(1,), pytest.param((0, 1), marks=pytest.mark.extended)], ids=["on rank 1", "on both ranks"]
)
def test_a_rank_out_of_memory_in_a_command_ends_the_group_for_the_others_wait_for_it(
    start_toy: StartToy, ranks: Sequence[int]
) -> None:
    point = "critic.update.begin"
    group = start_toy(2, failpoints={point: [{"rank": rank, "action": "out_of_memory"} for rank in ranks]})
    put_order(group.client, 1)
    error = error_of(group.client.update(1))
    assert isinstance(error, PeerDied)  # ABORTED: to send the update again would find nobody
    assert error.place.rank in ranks
    cause = f"MemoryError: failpoint {point} has fired"
    assert f"rank {error.place.rank} failed in step 1, Update: {cause}; the group ends" in str(error)
    assert group.group.wait_ended() != 0
    assert not group.group.announcement.exists()
    log = (group.run_dir / "logs" / f"critic_{error.place.rank}.log").read_text()
    assert "MemoryError" in log


def test_a_killed_follower_aborts_the_running_command_and_ends_the_group(start_toy: StartToy) -> None:
    killed = start_toy(2)
    put_order(killed.client, toy.BLOCK)
    running = killed.client.update(1)
    assert progress(running).phase == "blocked"
    killed.group.kill_rank(1)
    error = error_of(running)
    assert isinstance(error, PeerDied)
    assert "a peer rank died: rank 1" in str(error)
    assert killed.group.wait_ended() == 128 + signal.SIGKILL
    assert "error: rank 1 was ended by SIGKILL\n" in killed.group.output
    # For a caller without an open call.
    assert read_end_reason(killed.run_dir, "critic", killed.group.instance_id) == error.message


def test_every_rank_ends_when_the_launcher_goes_whose_file_has_no_line_of_a_log(start_toy: StartToy) -> None:
    orphaned = start_toy(2, lifeline=True)
    assert " INFO critic rank 0 " in (orphaned.group.run_dir / "logs" / "critic_0.log").read_text()
    assert " rank " not in orphaned.group.output
    put_order(orphaned.client, toy.BLOCK)
    assert progress(orphaned.client.update(1)).phase == "blocked"
    orphaned.group.cut_lifeline()
    orphaned.group.wait_ended()
    assert not any(is_alive(pid) for pid in orphaned.group.pids)


LAUNCHER = """
import sys
from pathlib import Path
from tests.support.groups import Group
file, folder = map(Path, sys.argv[1:])
group = Group("tests.integration.runtime.toy", file, folder, "critic", num_processes=2, overrides=(), lifeline=True)
print(group.process.pid, *group.wait_ready().pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "stopped", [*(pytest.param(one, marks=pytest.mark.extended) for one in ("torchrun", "ranks")), "all"]
)
def test_a_stopped_group_ends_with_a_launcher_that_is_killed(tmp_path: Path, stopped: str) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(write_config(tmp_path, 2)), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=PROJECT) as launcher:
        assert launcher.stdout is not None
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        for pid in {"torchrun": pids[:1], "ranks": pids[1:], "all": pids}[stopped]:
            os.kill(pid, signal.SIGSTOP)
        launcher.kill()
    try:
        wait_until(lambda: not any(is_alive(pid) for pid in pids), what="the end of the group")
    finally:
        for process in find_processes(pids):
            process.kill()


def test_every_rank_ends_when_torchrun_is_killed_and_no_folder_is_left(
    start_toy: StartToy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    orphaned = start_toy(2)
    os.kill(orphaned.group.process.pid, signal.SIGKILL)
    orphaned.group.wait_ended()
    assert list(temporary.glob("torch*")) == []


@pytest.mark.parametrize("ranks", [*(pytest.param(one, marks=pytest.mark.extended) for one in "01"), "01"])
def test_a_model_that_ranks_cannot_load_is_one_sentence(tmp_path: Path, ranks: str) -> None:
    (tmp_path / "broken_model").write_text(ranks)
    group = Group(MODULE, write_config(tmp_path, 2), tmp_path, "critic", num_processes=2)
    try:
        assert group.wait_ended(120) == 2
        assert group.output == "error: the model folder is broken: no weights\n"
        for rank in range(2):
            log = (tmp_path / "logs" / f"critic_{rank}.log").read_text()
            # A rank that has not failed may be ended by torchrun before it hears of the other one.
            assert "the model folder is broken" in log or "another rank has failed" in log or str(rank) not in ranks
            assert "Traceback" not in log
    finally:
        group.stop()
