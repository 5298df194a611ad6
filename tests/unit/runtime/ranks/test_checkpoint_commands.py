"""Checkpoints in a group of one rank: written files, and refusals before anything is changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from services.runtime.ranks.control_channel import ControlChannel, Order
from services.runtime.ranks.leader import Leader
from splitppo.manifest import read_manifest, write_manifest
from splitppo.rpc.errors import (
    DataLoss,
    Internal,
    InvalidArgument,
    NotFound,
    StorageFailed,
)
from splitppo.v1 import worker_pb2
from tests.support.checkpoints import DAMAGES
from tests.support.command_calls import result_of
from tests.support.groups import wait_until
from tests.unit.runtime.ranks.service import ROWS, GroupEnded, Service, experience, new_leader


def test_the_command_queue_goes_on_while_a_checkpoint_is_written(service: Service) -> None:
    service.update(1)
    saving = service.submit("SaveCheckpoint", base_step=1)
    service.work()
    assert service.update(2).committed_step == 2
    assert not saving.answered.is_set()
    service.role.durable.set_result("weights")
    saving.answered.wait(20)
    manifest = service.directory(1) / "manifest.json"
    assert result_of(saving).committed_step == 1
    assert result_of(saving).manifest_sha256 == hashlib.sha256(manifest.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(28, "No space left on device"), r"No space left on device: .*global_step_0/critic$"),
        (OSError(28, "No space left on device", "a.json", None, "b.json"), "No space left on device: b.json$"),
        (OSError("folder: I/O error"), "folder: I/O error$"),
    ],
)
def test_a_checkpoint_that_cannot_be_written_fails_its_call_only(
    service: Service, error: OSError, sentence: str
) -> None:
    saving = service.submit("SaveCheckpoint")
    service.work()
    service.role.durable.set_exception(error)
    saving.answered.wait(20)
    with pytest.raises(StorageFailed, match=sentence):
        result_of(saving)
    assert not (service.directory(0) / "manifest.json").exists()
    assert service.worker.is_serving


def test_a_bug_in_a_save_is_no_storage_that_failed(service: Service) -> None:
    service.role.durable.set_exception(RuntimeError("a shard has no name"))
    with pytest.raises(Internal, match="a shard has no name"):
        service.do("SaveCheckpoint")


def test_a_save_answers_whatever_its_thread_dies_of(service: Service) -> None:
    service.role.durable.set_exception(CheckpointException("read back", {}))  # torch's: it is no Exception
    with pytest.raises(Internal, match="CheckpointException"):
        service.do("SaveCheckpoint")


@pytest.fixture
def leader_of_two(service: Service) -> Leader:
    """A leader whose other rank hears, and has nothing to say."""
    failure: Any = service.failure
    return new_leader(service.worker, SilentPeer(), failure)


class SilentPeer(ControlChannel):
    """The channel of rank 0 of two; the other rank has no columns to send."""

    def __init__(self) -> None:
        super().__init__(2)

    def announce(self, order: Order) -> None:
        pass

    def receive(self, rank: int) -> None:
        return None


@pytest.mark.parametrize(
    ("error", "ends"),
    [(RuntimeError("[gloo/transport] Connection closed by peer"), True), (OSError(28, "full"), False)],
)
def test_a_save_that_loses_a_rank_ends_the_group_and_one_without_room_does_not(
    service: Service, leader_of_two: Leader, error: Exception, *, ends: bool
) -> None:
    service.leader = leader_of_two
    saving = service.submit("SaveCheckpoint")
    service.work()
    with suppress(GroupEnded):  # here, or in the thread that writes the manifest
        service.role.durable.set_exception(error)
    wait_until(lambda: service.failure.endings or saving.answered.is_set(), what="the end of the save")
    assert [ending for ending, _ in service.failure.endings] == ([error] if ends else [])


def test_a_folder_that_cannot_be_made_is_refused_before_the_group_hears_of_it(service: Service) -> None:
    (service.run_dir / "checkpoints").write_text("a file")
    with pytest.raises(StorageFailed, match=r"Not a directory: .*global_step_0/critic"):
        service.do("SaveCheckpoint")
    assert service.worker.is_serving


def test_loading_brings_back_step_and_ledger_and_drops_the_experience(service: Service) -> None:
    service.update(1)
    service.role.durable.set_result("weights")
    service.do("SaveCheckpoint", base_step=1)
    service.update(2)
    service.worker.slots.put(experience(3), ROWS, 2)
    assert service.do("LoadCheckpoint", base_step=2, step=1).committed_step == 1
    assert service.worker.slots.slots() == []
    assert service.do("Update", base_step=0, slot=experience(1)).replayed


def test_a_checkpoint_that_is_not_there_is_refused_before_anything_is_touched(service: Service) -> None:
    service.update(1)
    with pytest.raises(NotFound, match="global_step_7"):
        service.do("LoadCheckpoint", base_step=1, step=7)
    with pytest.raises(InvalidArgument, match="0 or more"):
        service.do("LoadCheckpoint", base_step=1, step=-1)
    assert service.worker.ledger.committed_step == 1
    assert service.worker.is_serving


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["state", "manifest.json"])
def test_a_damaged_checkpoint_is_refused_before_anything_is_touched(
    service: Service, name: str, damage: Callable[[Path], None]
) -> None:
    service.save(1)
    damage(service.directory(1) / name)
    service.role.before_load = lambda: pytest.fail("it was read for its meaning")
    with pytest.raises(DataLoss, match=f"global_step_1/critic/{name}: expected |{name}: the file is missing"):
        service.do("LoadCheckpoint", base_step=1, step=1)
    assert service.worker.is_serving
    service.role.before_load = lambda: None
    assert service.do("LoadCheckpoint", base_step=1, step=0).committed_step == 0


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_touched(service: Service) -> None:
    service.save(1)
    service.role.model = "an abacus"
    with pytest.raises(InvalidArgument, match="global_step_1/critic holds a counter, expected an abacus"):
        service.do("LoadCheckpoint", base_step=1, step=1)
    assert service.worker.is_serving


def test_the_part_of_another_step_is_refused_before_anything_is_touched(service: Service) -> None:
    service.save(1)
    service.directory(1).parent.rename(service.directory(1).parent.with_name("global_step_2"))
    with pytest.raises(InvalidArgument, match="holds the critic of step 1, expected the critic of step 2"):
        service.do("LoadCheckpoint", base_step=1, step=2)
    assert service.worker.is_serving


def test_loading_answers_what_the_weights_are_now(service: Service) -> None:
    service.save(1)
    assert service.do("LoadCheckpoint", base_step=1, step=1).weights_sha256 == service.role.compute_weights_digest()


def test_a_ledger_that_was_not_saved_is_refused(service: Service) -> None:
    service.save(1)
    manifest = read_manifest(service.directory(1))
    write_manifest(service.directory(1), replace(manifest, ledger_sha256="0" * 64))
    with pytest.raises(DataLoss, match=r"the ledger in .*global_step_1/critic is not the one that its manifest names"):
        service.do("LoadCheckpoint", base_step=1, step=1)


def test_a_load_that_fails_half_way_leaves_the_service_dirty(service: Service) -> None:
    def fail() -> None:
        raise ValueError("a shard cannot be read")

    service.role.before_load = fail
    with pytest.raises(InvalidArgument, match="a shard cannot be read"):
        service.do("LoadCheckpoint", step=0)
    assert service.worker.state == worker_pb2.WORKER_STATE_DIRTY
