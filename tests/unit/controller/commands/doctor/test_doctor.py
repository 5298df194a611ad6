"""The faults that the doctor reports: each has its sentence, its code and exit status 1."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import yaml

from controller.__main__ import main
from controller.commands.doctor.examination import examine_run
from controller.commands.doctor.facts import Code, Facts, Finding, GroupFacts, RunFacts, Status
from controller.commands.doctor.findings import find
from controller.commands.doctor.report import as_json, as_text
from controller.run.folder import RunFolder
from services.runtime.failures.heartbeat import VitalSign
from splitppo.batch import Batch
from splitppo.config import ConfigError, load_config
from splitppo.config.load import validate
from splitppo.config.section import RoleName, TrainedRoleName
from splitppo.images.decoder import describe_decoder
from splitppo.machine.children.tree import is_stopped
from splitppo.rpc.bearer_tokens import BearerTokens
from splitppo.rpc.credentials import Credentials
from splitppo.rpc.request_id import PROTOCOL_VERSION
from splitppo.run_folder.processes import Group
from splitppo.run_folder.summary import Summary, ThisStart
from splitppo.v1 import batch_pb2, worker_pb2
from tests.support import disks, models
from tests.support.certificates import TOKEN, secure
from tests.support.groups import PROJECT, free_address, wait_until
from tests.unit.controller.commands.doctor.conftest import Serve, Served, ask, credentials, external, tree

pytestmark = pytest.mark.slow

SLOT = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=1)


async def ask_actor(actor: Served, run_dir: Path) -> list[Finding]:
    return (await ask(external(run_dir, actor.address)))[1]


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


@pytest.mark.promise("a doctor")
async def test_healthy_groups_are_described_and_left_as_they_were(serve: Serve, run_dir: Path) -> None:
    actor, critic = await serve("actor", tree(run_dir)), await serve("critic", tree(run_dir))
    for served in (actor, critic):
        served.worker.fencing.take("run", 7)
    actor.worker.slots.put(SLOT, Batch.from_rows(prompts=[[1]]), 0)
    before = names(run_dir)
    facts, findings = await ask(external(run_dir, actor.address, critic.address))
    assert findings == []
    assert actor.worker.fencing.epoch == 7
    assert actor.worker.slots.slots() == [SLOT]
    assert names(run_dir) == before

    content = json.loads(as_json(facts, findings))
    group = content["groups"]["actor"]
    assert (content["healthy"], group["state"], group["epoch"], group["num_slots"]) == (True, "idle", 7, 1)
    assert [(rank["device"], rank["total_bytes"]) for rank in group["ranks"]] == [("H200", 4 << 30)] * 2
    assert 0.0 < group["round_trip_p50_s"] <= group["round_trip_p99_s"]
    assert min(group["upload_bytes_per_s"], group["download_bytes_per_s"]) > 0.0
    assert abs(group["clock_offset_s"]) < 1.0
    assert (group["shares_run_dir"], group["is_run_dir_writable"]) == (True, True)

    text = as_text(facts, findings)
    assert text.endswith("\nhealthy\n")
    for shown in (actor.address, critic.address, "H200", "3.0 GiB of 4.0 GiB free", "idle", "shared"):
        assert shown in text


async def test_a_rollout_group_that_waits_for_weights_is_healthy(serve: Serve, run_dir: Path) -> None:
    theirs = tree(run_dir, has_critic=False, rollout={})
    actor, rollout = await serve("actor", theirs), await serve("rollout", theirs)
    facts, findings = await ask(external(run_dir, actor.address, rollout={"address": rollout.address}))
    assert findings == []
    status = facts.groups["rollout"].status
    assert status is not None
    assert (status.role, status.step) == ("rollout", -1)


async def test_a_worker_of_another_make_that_cannot_be_diagnosed_is_healthy(serve: Serve, run_dir: Path) -> None:
    actor = await serve("actor", tree(run_dir), without="Diagnose")
    facts, findings = await ask(external(run_dir, actor.address))
    assert findings == []
    assert facts.groups["actor"].diagnosis is None
    assert facts.groups["actor"].flat()["ranks"] == []


@pytest.mark.promise("a doctor")
async def test_a_group_that_is_down_is_found_and_the_others_are_asked_all_the_same(serve: Serve, run_dir: Path) -> None:
    critic = await serve("critic", tree(run_dir))
    facts, [finding] = await ask(external(run_dir, address := free_address(), critic.address))
    assert (finding.code, finding.about) == ("down", "actor")
    assert finding.sentence == f"the actor at {address} cannot be asked: nothing listens there (connection refused)"
    assert f"{run_dir}/logs/actor_0.log" in finding.advice
    assert facts.groups["critic"].diagnosis is not None
    groups = json.loads(as_json(facts, [finding]))["groups"]
    assert groups["actor"].keys() == groups["critic"].keys()
    assert (groups["actor"]["is_reached"], groups["critic"]["is_reached"]) == (False, True)
    assert (groups["actor"]["state"], groups["actor"]["num_round_trips"], groups["actor"]["ranks"]) == (None, 0, [])
    assert "not reached" in as_text(facts, [finding])


async def test_a_name_that_nobody_knows_is_said(run_dir: Path, tmp_path: Path) -> None:
    _, [finding] = await ask(external(run_dir, "no.such.host.invalid:7001", security=secure(tmp_path)))
    assert finding.code in ("address", "silent")  # by a resolver that answers, or one that does not
    assert "no.such.host.invalid:7001" in finding.sentence


@pytest.mark.extended
async def test_what_takes_connections_and_says_nothing_is_given_up_within_seconds(run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        _, [finding] = await ask(external(run_dir, f"127.0.0.1:{deaf.getsockname()[1]}"))
    assert finding.code == "silent"
    assert "it takes connections and says nothing within 3 s" in finding.sentence


async def test_another_configuration_is_named_by_its_keys_where_the_run_folder_has_it(
    serve: Serve, run_dir: Path
) -> None:
    theirs = tree(run_dir, has_critic=False)
    theirs["actor"]["lr"] = 0.125
    actor = await serve("actor", theirs)
    [finding] = await ask_actor(actor, run_dir)
    assert finding.code == "config"
    assert "its digest begins with" in finding.sentence
    (run_dir / "config.yaml").write_text(yaml.safe_dump(theirs))
    [finding] = await ask_actor(actor, run_dir)
    assert finding.sentence.endswith("was started with another configuration: actor.lr is 0.125 there, 1e-06 here")


async def test_the_configuration_that_a_run_folder_keeps_is_as_good_as_the_runs_own(
    serve: Serve, run_dir: Path, tmp_path: Path
) -> None:
    security = secure(tmp_path)
    actor = await serve("actor", tree(run_dir, has_critic=False), credentials(tmp_path, "actor"))
    with RunFolder(validate(external(run_dir, actor.address, security=security), "test")) as folder:
        stored = load_config(folder.config_file)
        assert find(await examine_run(stored)) == []


async def test_groups_that_were_mixed_up_are_told_apart(serve: Serve, run_dir: Path) -> None:
    critic = await serve("critic", tree(run_dir))
    [finding] = await ask_actor(critic, run_dir)
    assert finding.code == "role"
    assert finding.sentence == f"the actor at {critic.address} is a critic, expected the actor"


def test_what_generation_waits_for_is_part_of_its_state(run_dir: Path) -> None:
    status = worker_pb2.GetStatusResponse(
        state=worker_pb2.WORKER_STATE_BUSY,
        running_method="Generate",
        progress=worker_pb2.Progress(done=128, total=3072, phase="waiting for 32 replies"),
    )
    group = GroupFacts("localhost:1", "digest", status=Status.of(status))
    facts = Facts(RunFacts(str(run_dir), "local"), now_unix_s=0.0, groups={"actor": group})
    assert "busy: Generate, 128 of 3072, waiting for 32 replies" in as_text(facts, [])


def test_a_worker_that_says_what_only_a_newer_version_knows_is_shown_as_it_says(run_dir: Path) -> None:
    status = Status.of(worker_pb2.GetStatusResponse(role=99, state=98))  # type: ignore[arg-type]
    assert (status.role, status.state) == ("99", "98")
    group = GroupFacts("here", "d", status=status)
    facts = Facts(RunFacts(str(run_dir), "local"), now_unix_s=0.0, groups={"actor": group})
    assert {finding.code for finding in find(facts)} == {"role", "version"}
    assert "98" in as_text(facts, [])


async def test_a_clock_that_is_off_by_more_than_a_second_is_found(serve: Serve, run_dir: Path) -> None:
    actor = await serve("actor", tree(run_dir), clock_offset_s=60.0)
    facts, [finding] = await ask(external(run_dir, actor.address))
    assert finding.code == "clock"
    assert "is 60.0 s ahead of this machine's" in finding.sentence
    actor_facts = facts.groups["actor"]
    assert actor_facts.connection is not None
    actor_facts.connection = replace(actor_facts.connection, clock_offset_s=-60.0)
    assert "is 60.0 s behind this machine's" in find(facts)[0].sentence
    actor_facts.connection = replace(actor_facts.connection, clock_offset_s=0.5)
    assert find(facts) == []


async def test_groups_that_decode_images_otherwise_are_found(serve: Serve, run_dir: Path) -> None:
    groups = {role: await serve(role, tree(run_dir)) for role in ("actor", "critic")}
    asked = external(run_dir, groups["actor"].address, groups["critic"].address)
    for group in groups.values():
        group.worker.reads_images = True

    facts, findings = await ask(asked)

    assert findings == []
    decoders = {role: group.diagnosis.image_decoder for role, group in facts.groups.items() if group.diagnosis}
    assert set(decoders.values()) == {describe_decoder()}
    critic = facts.groups["critic"]
    assert critic.diagnosis is not None
    critic.diagnosis = replace(critic.diagnosis, image_decoder="Pillow 9.5.0, 0123")
    [finding] = find(facts)
    assert (finding.code, finding.about) == ("images", "critic")
    assert finding.sentence == (
        f"the critic decodes images by Pillow 9.5.0, 0123, the actor by {describe_decoder()}: they see other pixels"
    )
    critic.diagnosis = replace(critic.diagnosis, image_decoder=None)  # it reads text alone
    assert find(facts) == []


async def test_a_run_folder_that_is_not_shared_is_found_and_one_that_is_gone_here(
    serve: Serve, run_dir: Path, tmp_path: Path
) -> None:
    actor = await serve("actor", tree(tmp_path / "elsewhere"))
    [finding] = await ask_actor(actor, run_dir)
    assert (finding.code, finding.about) == ("run_folder", "actor")
    assert f"a file made in {run_dir} is not in its {tmp_path / 'elsewhere'}" in finding.sentence
    [finding] = await ask_actor(actor, tmp_path / "nowhere")
    assert (finding.code, finding.about) == ("run_folder", "run")
    assert f"nothing can be written into the run folder {tmp_path / 'nowhere'}" in finding.sentence


async def test_a_rank_without_a_sign_of_life_is_named(serve: Serve, run_dir: Path) -> None:
    actor = await serve("actor", tree(run_dir))
    actor.signs[1] = VitalSign(actor.signs[1].device, 42.0)
    [finding] = await ask_actor(actor, run_dir)
    assert finding.code == "silent_rank"
    assert "rank 1 of the actor (pid 101 on gpu-one) has given no sign of life for 42 s" in finding.sentence


async def test_a_group_that_is_dirty_or_leaves_is_found(serve: Serve, run_dir: Path) -> None:
    actor = await serve("actor", tree(run_dir))
    for change, said in ((actor.worker.drain, "is draining"), (lambda: actor.worker.mark_dirty("x"), "is dirty")):
        change()
        [finding] = await ask_actor(actor, run_dir)
        assert (finding.code, said in finding.sentence) == ("state", True)


def status_of(role: RoleName, step: int, epoch: int) -> worker_pb2.GetStatusResponse:
    return worker_pb2.GetStatusResponse(
        role=worker_pb2.Role.Value(f"ROLE_{role.upper()}"),
        committed_step=step,
        epoch=epoch,
        protocol_version=PROTOCOL_VERSION,
        config_digest="d",
    )


def test_a_group_that_knows_no_controller_is_found_where_another_one_does(run_dir: Path) -> None:
    def facts(**epochs: int) -> Facts:
        groups = {
            role: GroupFacts("here", "d", status=Status.of(status_of(role, step, epochs[role])))
            for role, step in zip(get_args(TrainedRoleName), (4, 3), strict=True)
        }
        return Facts(RunFacts(str(run_dir), "local"), now_unix_s=0.0, groups=groups)

    assert find(facts(actor=0, critic=0)) == []
    [finding] = find(facts(actor=0, critic=2))
    assert (finding.code, finding.about) == ("restarted", "actor")
    assert "knows no controller; others work for epoch 2" in finding.sentence


# The run folder and its disk.


async def test_a_disk_without_room_for_the_next_checkpoint_is_found(tmp_path: Path) -> None:
    with disks.mounted(tmp_path / "disk", "size=8m") as disk:
        run_dir = disk / "run"
        last_one = run_dir / "checkpoints" / "global_step_3"
        last_one.mkdir(parents=True)
        (last_one / "COMMITTED").touch()
        (last_one / "weights").write_bytes(bytes(3 << 20))
        facts, findings = await ask(tree(run_dir))
        assert findings == []
        assert (facts.run.last_checkpoint_step, facts.run.next_checkpoint_bytes) == (3, 3 << 20)
        disks.fill(disk, left=2 << 20)
        _, [finding] = await ask(tree(run_dir))
        assert finding.code == "disk"
        assert re.search(r"has 2\.\d MiB free, and the next checkpoint takes about 3\.0 MiB", finding.sentence)


async def test_before_the_first_checkpoint_its_size_is_that_of_the_models(run_dir: Path, tmp_path: Path) -> None:
    configuration = tree(run_dir, has_critic=False)
    configuration["actor"]["model"] = str(models.save_policy(tmp_path / "policy"))
    facts, _ = await ask(configuration)
    num_parameters = (tmp_path / "policy" / "model.safetensors").stat().st_size / 4
    assert facts.run.next_checkpoint_bytes == pytest.approx(12 * num_parameters, rel=0.1)
    configuration["actor"]["lora_rank"] = 2  # by hand: in two layers q, o; k, v; gate, up, down
    adapters = 2 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    facts, _ = await ask(configuration)
    assert facts.run.next_checkpoint_bytes == 12 * adapters


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Locks the folder as a controller does."""
    with (run_dir / "controller.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def announce(run_dir: Path, role: str, address: str) -> None:
    Group(role, address, "instance", []).announce(run_dir)


async def test_a_local_run_is_found_by_its_folder_with_its_token(serve: Serve, run_dir: Path) -> None:
    tokens = Credentials(tokens=BearerTokens((TOKEN,)))
    with locked(run_dir):
        (run_dir / "services").mkdir()
        (run_dir / "services" / "token").write_text(TOKEN)
        for role in ("actor", "critic"):
            announce(run_dir, role, (await serve(role, tree(run_dir), tokens)).address)
        facts, findings = await ask(tree(run_dir))
        assert findings == []
        assert (facts.run.is_live, facts.run.controller_runs, facts.run.token) == (True, True, True)
        (run_dir / "services" / "critic.json").unlink()
        _, [finding] = await ask(tree(run_dir))
        assert (finding.code, finding.about) == ("not_announced", "critic")
        assert str(run_dir / "services" / "critic.json") in finding.sentence


async def test_a_run_that_starts_has_no_fault_until_its_groups_were_reached(run_dir: Path) -> None:
    with locked(run_dir):
        announce(run_dir, "critic", free_address())  # left behind by an earlier start
        (run_dir / "controller.epoch").write_text('{"run_id": "r", "epoch": 1}')
        facts, findings = await ask(tree(run_dir))
        assert findings == []
        assert facts.notes[0].startswith("the run is starting: waiting for actor and critic")
        (run_dir / "processes.json").write_text("[]")
        assert [finding.code for finding in (await ask(tree(run_dir)))[1]] == ["not_announced", "down"]


async def test_what_a_local_run_has_left_behind_is_no_live_run(run_dir: Path) -> None:
    with locked(run_dir):
        for role in ("actor", "critic"):
            announce(run_dir, role, free_address())
        assert [finding.code for finding in (await ask(tree(run_dir)))[1]] == ["down", "down"]
    facts, findings = await ask(tree(run_dir))
    assert findings == []
    assert not facts.run.is_live
    assert facts.notes == [f"no run is live in {run_dir}, so there are no groups to ask (services.launch: local)"]
    assert "\nwire         plaintext on this machine\n" in as_text(facts, findings)


async def test_a_run_whose_controller_is_gone_is_unfinished_until_its_summary_says_completed(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text('{"step": 12}\n')
    _, [finding] = await ask(tree(run_dir))
    assert finding.code == "unfinished"
    assert "not finished: step 12 is its last one so far" in finding.sentence
    assert "starts again: there is no checkpoint" in finding.advice
    with locked(run_dir):
        assert "unfinished" not in [finding.code for finding in (await ask(tree(run_dir)))[1]]
    start = ThisStart(resumed_at_step=0, wall_s=1.0)
    for step, codes in ((11, ["unfinished"]), (12, [])):  # extended since, and as it is
        end = {"exit_reason": "completed", "finished": True, "this_start": start}
        ended = Summary(global_step=step, train_s=1.0, tokens=1, **end)
        ended.write(run_dir / "summary.json")
        assert [finding.code for finding in (await ask(tree(run_dir)))[1]] == codes


async def test_a_run_folder_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.dir: there is no run folder .*none"):
        await ask(tree(tmp_path / "none"))


async def test_a_stopped_rank_of_this_machine_is_named_by_pid_and_state(run_dir: Path) -> None:
    rank = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220 - it only has to be there
    with locked(run_dir), socket.create_server(("127.0.0.1", 0)) as deaf:
        rank.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(rank.pid))
        announce(run_dir, "actor", f"127.0.0.1:{deaf.getsockname()[1]}")
        here = {"host": os.uname().nodename}
        rows = [
            here | {"role": "actor", "rank": 0, "pid": rank.pid},
            here | {"role": "controller", "rank": 0, "pid": 1},
        ]
        (run_dir / "processes.json").write_text(json.dumps(rows))
        try:
            _, [finding] = await ask(tree(run_dir, has_critic=False))
        finally:
            rank.kill()
            rank.wait()
    assert (finding.code, finding.about) == ("stopped", "actor")
    assert f"rank 0 of the actor (pid {rank.pid} on this machine) is stopped (state T)" in finding.sentence


async def test_a_local_run_of_another_machine_has_to_be_asked_there(run_dir: Path) -> None:
    with locked(run_dir):
        rows = [{"role": "controller", "rank": 0, "pid": 1, "host": f"not-{os.uname().nodename}"}]
        (run_dir / "processes.json").write_text(json.dumps(rows))
        facts, [finding] = await ask(tree(run_dir))
    assert finding.code == "other_machine"
    assert facts.groups == {}


# The command.


def test_the_command_says_healthy_or_what_is_wrong_by_its_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    (tmp_path / "new").mkdir()
    file.write_text(yaml.safe_dump(tree(tmp_path / "new")))
    assert main(["doctor", "--config", str(file)]) == 0
    assert capsys.readouterr().out.endswith("\nhealthy\n")
    down = [
        f"run.dir={tmp_path / 'nowhere'}",
        "services.launch=external",
        *(f"services.{role}.address={free_address()}" for role in ("actor", "critic")),
    ]
    assert main(["doctor", "--config", str(file), "--json", *down]) == 1
    content = json.loads(capsys.readouterr().out)
    # The run folder is not there, either.
    assert [finding["code"] for finding in content["findings"]] == ["run_folder", "down", "down"]
    assert main(["doctor", "--config", str(file), "services.launch=external"]) == 2
    assert "services.actor.address: expected host:port" in capsys.readouterr().err


def test_the_page_names_every_finding() -> None:
    page = (PROJECT / "docs" / "doctor.md").read_text(encoding="utf-8")
    codes = {code for part in get_args(Code) for code in get_args(part)}
    assert set(re.findall(r"^\| `([a-z_]+)` \|", page, re.MULTILINE)) == codes


@pytest.mark.parametrize("content", ['{"actor": 5}', "[5]", "xx", "[" * 9999])
async def test_a_broken_list_of_processes_is_an_empty_one(serve: Serve, run_dir: Path, content: str) -> None:
    actor = await serve("actor", tree(run_dir))
    (run_dir / "processes.json").write_text(content)
    facts, _ = await ask(external(run_dir, actor.address))
    assert facts.groups["actor"].connection is not None
