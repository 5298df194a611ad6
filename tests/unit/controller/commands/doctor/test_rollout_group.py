"""The doctor and a rollout group: the version that the group has, and room for the weights that are published."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.commands.doctor.report import as_text
from tests.support import disks, models
from tests.support.groups import free_address
from tests.unit.controller.commands.doctor.conftest import Serve, ask, external, tree


async def test_a_rollout_group_that_waits_for_its_first_weights_is_healthy(serve: Serve, run_dir: Path) -> None:
    group = {"rollout": {"num_processes": 1}}
    actor = await serve("actor", tree(run_dir, **group))
    rollout = await serve("rollout", tree(run_dir, **group))
    for served in (actor, rollout):
        served.worker.fencing.take("run", 7)
    facts, findings = await ask(external(run_dir, actor.address, rollout={"address": rollout.address}))
    assert findings == []
    status = facts.groups["rollout"].status
    assert status is not None
    assert status.step == -1
    [line] = [line for line in as_text(facts, findings).splitlines() if line.startswith("step, epoch")]
    assert line.split() == ["step,", "epoch", "0,", "7", "no", "weights,", "7"]


async def test_a_disk_without_room_for_two_versions_of_the_weights_is_found(tmp_path: Path) -> None:
    model = models.save_policy(tmp_path / "policy", hidden_size=256)
    weights_bytes = (model / "model.safetensors").stat().st_size
    (tmp_path / "run").mkdir()
    with disks.mounted(tmp_path / "disk", f"size={4 * weights_bytes}") as disk:
        configuration = tree(tmp_path / "run", rollout={})
        configuration["actor"] |= {"model": str(model), "dtype": "fp32"}
        configuration["rollout"] |= {"sync_dir": str(disk / "weights")}
        facts, findings = await ask(configuration)
        assert findings == []
        assert facts.run.weights_needed_bytes == pytest.approx(2 * weights_bytes, rel=0.1)
        disks.fill(disk, left=weights_bytes)
        facts, [finding] = await ask(configuration)
        assert (finding.code, finding.sentence.startswith(f"the disk of {disk / 'weights'} has ")) == ("disk", True)
        assert "two versions of the weights need" in finding.sentence
        # One of them is there, and the other one just fits. Other files there are no version.
        (disk / "filler").unlink()
        (disk / "weights" / "of_somebody").mkdir(parents=True)
        (disk / "weights" / "of_somebody" / "file").write_bytes(bytes(weights_bytes))
        (disk / "weights" / "version_0").mkdir(parents=True)
        (disk / "weights" / "version_0" / "weights-0.safetensors").write_bytes(bytes(weights_bytes))
        disks.fill(disk, left=weights_bytes + (64 << 10))
        assert (await ask(configuration))[1] == []
        disks.fill(disk, left=weights_bytes // 2)
        assert len((await ask(configuration))[1]) == 1


async def test_a_folder_of_weights_on_other_machines_is_not_looked_at(serve: Serve, run_dir: Path) -> None:
    sync = {"sync_dir": "/somewhere/else"}
    configuration = external(run_dir, free_address(), rollout={"address": free_address()})
    configuration["rollout"] |= sync
    assert (await ask(configuration))[0].run.weights_dir is None
