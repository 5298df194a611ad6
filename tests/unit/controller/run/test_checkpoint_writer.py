"""Writing a pair in the background: when it is complete, where an error is raised, and giving up."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from controller.run.checkpoint_store import CheckpointStore, CommitMarker
from controller.run.checkpoint_writer import CheckpointFailed, CheckpointWriter
from controller.run.state import RunState
from splitppo.config import Schedule
from splitppo.rpc.errors import StorageFailed, Unavailable
from splitppo.run_folder.spans import Span
from tests.support.call_log import CallLog
from tests.support.fake_services import FakeActor, FakeClient, FakeCritic, make_config


class Pair:
    """A writer over two fake services whose step 1 is committed."""

    def __init__(self, run_dir: Path, schedule: Schedule = "gather") -> None:
        self.log = CallLog()
        self.clients: list[FakeClient] = [FakeActor(self.log), FakeCritic(self.log)]
        self.store = CheckpointStore(run_dir / "checkpoints")
        self.committed: list[int] = []
        self.spans: list[Span] = []
        self.writer = CheckpointWriter(
            self.store,
            self.clients,
            make_config(run_dir, run__schedule=schedule),
            on_saved=self.spans.extend,
            on_commit=self.committed.append,
        )
        self.metrics: asyncio.Future[dict[str, float]] = asyncio.get_running_loop().create_future()

    async def begin(self, step: int = 1) -> None:
        for client in self.clients:
            client.committed_step = step
        await self.writer.begin(RunState(step=step, kl_coef=0.5), metrics=self.metrics)


async def settle() -> None:
    """Lets every task go as far as it can without an event from outside."""
    for _ in range(20):
        await asyncio.sleep(0)


async def check_at_every_step(writer: CheckpointWriter) -> None:
    while True:
        writer.check()
        await asyncio.sleep(0)


@pytest.fixture
async def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


async def test_services_save_only_when_the_step_is_complete(pair: Pair) -> None:
    await pair.begin()
    await settle()
    assert pair.log.names() == []
    pair.metrics.set_result({"training/global_step": 1.0})
    await pair.writer.join()
    assert pair.log.names() == ["actor.save_checkpoint", "critic.save_checkpoint"]
    assert pair.store.load(1).state.kl_coef == 0.5
    assert pair.store.load(1).metrics == {"training/global_step": 1.0}
    assert pair.committed == [1]


async def test_the_checkpoint_counts_when_both_parts_are_durable(pair: Pair) -> None:
    make_durable = pair.log.hold("critic.save_checkpoint")
    pair.metrics.set_result({"training/global_step": 1.0})
    await pair.begin()
    await pair.log.until("end", "actor.save_checkpoint", 1)
    assert pair.store.steps() == []
    make_durable.set()
    await pair.writer.join()
    assert pair.store.steps() == [1]


async def test_both_services_save_at_the_same_time(pair: Pair) -> None:
    pair.log.meet("actor.save_checkpoint", "critic.save_checkpoint")
    pair.metrics.set_result({"training/global_step": 1.0})
    await pair.begin()
    await pair.writer.join()


async def test_in_serial_services_save_one_after_the_other(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "serial")
    pair.metrics.set_result({"training/global_step": 1.0})
    await pair.begin()
    await pair.writer.join()
    assert pair.log.most_at_once() == 1
    assert pair.log.names() == ["actor.save_checkpoint", "critic.save_checkpoint"]


async def test_what_the_engines_did_is_known_before_the_checkpoint_counts(pair: Pair) -> None:
    make_durable = pair.log.hold("critic.save_checkpoint")
    pair.metrics.set_result({"training/global_step": 1.0})
    await pair.begin()
    await pair.log.until("end", "actor.save_checkpoint", 1)
    assert pair.spans == []
    make_durable.set()
    await pair.writer.join()
    assert [(span.pool, span.name, span.step) for span in pair.spans] == [
        ("actor", "save_checkpoint", 1),
        ("critic", "save_checkpoint", 1),
    ]


async def test_the_next_checkpoint_waits_for_the_one_before(pair: Pair) -> None:
    make_durable = pair.log.hold("actor.save_checkpoint", at_step=1)
    pair.metrics.set_result({"training/global_step": 1.0})
    await pair.begin(1)
    await pair.log.until("end", "critic.save_checkpoint", 1)
    second = asyncio.create_task(pair.writer.begin(RunState(step=2, kl_coef=0.5), metrics=pair.metrics))
    await settle()
    assert not second.done()
    make_durable.set()
    await second
    assert pair.store.steps() == [1]
    await pair.writer.abandon()


async def test_a_failed_save_comes_out_once_at_the_next_begin(pair: Pair) -> None:
    pair.log.fail("critic.save_checkpoint", OSError("no space left"))
    pair.metrics.set_result({"training/global_step": 1.0})
    await pair.begin(1)
    with pytest.raises(OSError, match="no space left"):
        await pair.begin(1)
    await pair.writer.join()
    assert pair.store.steps() == []


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), StorageFailed("No space left on device: shard")]
)
async def test_storage_that_fails_is_heard_at_the_next_check_in_one_sentence(pair: Pair, error: Exception) -> None:
    pair.metrics.set_result({"training/global_step": 1.0})
    await pair.begin(1)
    pair.writer.check()
    await pair.writer.join()
    pair.log.fail("critic.save_checkpoint", error, at_step=2)
    await pair.begin(2)
    with pytest.raises(CheckpointFailed) as failed:
        await asyncio.wait_for(check_at_every_step(pair.writer), 20)
    sentence = str(failed.value)
    assert sentence.startswith("the checkpoint of step 2 could not be written: ")
    assert "No space left on device" in sentence
    assert sentence.endswith(f"; the last good checkpoint is {pair.store.folder(1)}, which is untouched")
    pair.writer.check()
    assert pair.store.steps() == pair.committed == [1]


async def test_the_first_checkpoint_that_cannot_be_written_says_that_there_is_no_other(pair: Pair) -> None:
    pair.log.fail("actor.save_checkpoint", StorageFailed("Read-only file system: x"))
    pair.metrics.set_result({"training/global_step": 1.0})
    await pair.begin(1)
    with pytest.raises(CheckpointFailed, match="there is no earlier checkpoint, the run would start again at step 0"):
        await pair.writer.join()


async def test_a_lost_group_is_not_storage_that_failed(pair: Pair) -> None:
    pair.log.fail("actor.save_checkpoint", Unavailable("gone"))
    pair.metrics.set_result({"training/global_step": 1.0})
    await pair.begin(1)
    with pytest.raises(Unavailable, match="gone"):
        await pair.writer.join()


async def test_the_marker_names_what_each_service_has_said_of_its_part(pair: Pair) -> None:
    pair.metrics.set_result({"training/global_step": 1.0})
    await pair.begin(1)
    await pair.writer.join()
    marker = CommitMarker.read(pair.store.folder(1) / "COMMITTED")
    assert marker.manifests == {"actor": "actor 1", "critic": "critic 1"}


async def test_a_failed_save_comes_out_at_the_join(pair: Pair) -> None:
    pair.log.hold("actor.save_checkpoint")
    pair.log.fail("critic.save_checkpoint", OSError("no space left"))
    pair.metrics.set_result({"training/global_step": 1.0})
    await pair.begin()
    with pytest.raises(OSError, match="no space left"):
        await pair.writer.join()


async def test_a_checkpoint_given_up_never_counts(pair: Pair) -> None:
    pair.log.hold("critic.save_checkpoint")
    pair.metrics.set_result({"training/global_step": 1.0})
    await pair.begin()
    await pair.log.until("end", "actor.save_checkpoint", 1)
    await pair.writer.abandon()
    await pair.writer.join()
    assert pair.store.steps() == []


async def test_giving_up_waits_for_a_commit_that_is_being_written(tmp_path: Path) -> None:
    class SlowStore(CheckpointStore):
        begun, go_on = threading.Event(), threading.Event()

        def commit(self, *args: Any, **kwargs: Any) -> None:
            self.begun.set()
            assert self.go_on.wait(20)
            super().commit(*args, **kwargs)

    store = SlowStore(tmp_path)
    writer = CheckpointWriter(store, [], make_config(tmp_path), on_saved=lambda _: None, on_commit=lambda _: None)
    await writer.begin(RunState(step=1, kl_coef=0.5), metrics=asyncio.sleep(0, {}))
    await asyncio.to_thread(store.begun.wait, 20)
    giving_up = asyncio.create_task(writer.abandon())
    await settle()
    assert not giving_up.done()
    store.go_on.set()
    await giving_up
    assert store.steps() == [1]


async def test_giving_up_swallows_what_went_wrong(pair: Pair) -> None:
    pair.log.fail("actor.save_checkpoint", OSError("no space left"))
    pair.metrics.set_result({"training/global_step": 1.0})
    await pair.begin()
    await pair.log.until("begin", "actor.save_checkpoint", 1)
    await pair.writer.abandon()
    await pair.writer.join()


async def test_a_cancelled_join_leaves_the_checkpoint_to_be_joined_again(pair: Pair) -> None:
    make_durable = pair.log.hold("actor.save_checkpoint")
    pair.metrics.set_result({"training/global_step": 1.0})
    await pair.begin()
    joining = asyncio.create_task(pair.writer.join())
    await pair.log.until("end", "critic.save_checkpoint", 1)
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    make_durable.set()
    await pair.writer.join()
    assert pair.store.steps() == [1]


async def test_joining_and_giving_up_nothing_does_nothing(pair: Pair) -> None:
    await pair.writer.join()
    await pair.writer.abandon()
