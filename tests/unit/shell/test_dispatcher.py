"""The loop of rank 0, in a group of one: who is let in, what is kept, what a failure leaves behind."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from services.shell.collectives import ControlChannel, Order, OrderKind
from services.shell.commands import Command, CommandCancelled, Outcome
from services.shell.context import RankContext
from services.shell.dispatcher import Leader
from services.shell.ledger import Ledger
from services.shell.lifecycle import Lifecycle
from services.shell.mailbox import Call, Mailbox, draining
from services.shell.slots import SlotStore
from services.shell.worker import Worker
from splitppo.batch import Batch
from splitppo.config.load import validate
from splitppo.manifest import read_manifest, write_manifest
from splitppo.rpc.errors import (
    DataLoss,
    Dirty,
    Internal,
    InvalidArgument,
    NotFound,
    OutOfMemory,
    Place,
    StaleEpoch,
    StorageFailed,
    Unavailable,
    WrongState,
    WrongStep,
)
from splitppo.v1 import batch_pb2, critic_pb2, worker_pb2
from tests.checkpoints import DAMAGES
from tests.groups import wait_until

ROWS = Batch.from_rows(prompts=[[1], [2, 3]], responses=[[4], [5, 6]])


def experience(step: int) -> batch_pb2.Slot:
    return batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=step)


class Counter:
    """A role whose weights are one parameter; each update adds 1 to it."""

    role = worker_pb2.ROLE_CRITIC
    num_parameters = 1
    model = "a counter"

    def __init__(self) -> None:
        self.weights = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.weights], lr=1.0)
        self.before_step: Callable[[], None] = lambda: None
        self.after_step: Callable[[], None] = lambda: None
        self.before_load: Callable[[], None] = lambda: None
        self.metrics: dict[str, Any] = {}
        self.groups: list[int] = []
        self.working: Callable[[Batch, Any], None] = lambda batch, report: None
        self.durable: Future[str] = Future()

    def commands(self) -> tuple[Command, Command]:
        return (
            Command(
                "ComputeValues",
                critic_pb2.ComputeValuesRequest,
                self.compute_values,
                columns=("prompts", "responses"),
                optional_columns=("values",),
                prepare=self.prepare,
                cancellable=True,
            ),
            Command("Update", critic_pb2.CriticUpdateRequest, self.update, columns=("prompts",), commits=True),
        )

    def prepare(self, request: Any, batch: Batch) -> Batch:
        if int(batch["prompts"].values[0]) > 100:
            raise ValueError("the first token is over 100")
        if self.groups:
            return batch.merge(Batch.from_rows(groups=[[group] for group in self.groups]))
        return batch

    def compute_values(self, request: Any, batch: Batch | None, progress: Any) -> Outcome:
        assert batch is not None
        self.before_step()
        self.working(batch, progress)
        progress(1, 1, "values")
        return Outcome(Batch(batch.num_rows, {"values": replace_dtype(batch)}), self.metrics, policy_version=5)

    def update(self, request: Any, batch: Batch | None, progress: Any) -> Outcome:
        self.before_step()
        self.weights.grad = -torch.ones(1)
        self.optimizer.step()
        self.after_step()
        return Outcome(metrics=self.metrics)

    def save_checkpoint(self, directory: Path, service_state: bytes, *, with_hf_model: bool) -> Future[str]:
        (directory / "state").write_bytes(service_state)
        return self.durable

    def check_checkpoint(self, directory: Path) -> None:
        if not (directory / "state").exists():
            raise ValueError(f"{directory} is torn")

    def load_checkpoint(self, directory: Path | None) -> bytes:
        self.before_load()
        if directory is None:
            return b""
        return (directory / "state").read_bytes()

    def compute_weights_digest(self) -> str:
        return f"{float(self.weights.detach()):g}"


def replace_dtype(batch: Batch) -> Any:
    responses = batch["responses"]
    return replace(responses, values=responses.values.astype("float32"))


class GroupEnded(BaseException):
    """Stands for the end of the process."""


class RecordedFailureWatch:
    """What the group ended with."""

    def __init__(self) -> None:
        self.endings: list[tuple[BaseException, Place]] = []

    def end_group(self, error: BaseException, place: Place) -> NoReturn:
        self.endings.append((error, place))
        raise GroupEnded


class Service:
    """A leader without followers; `do` runs one call through mailbox and engine."""

    def __init__(self, run_dir: Path) -> None:
        config = validate(
            {
                "run": {"dir": str(run_dir), "total_steps": 1},
                "data": {"train_files": "x", "train_batch_size": 1},
                "actor": {"model": "x"},
            },
            "test",
        )
        self.role = Counter()
        control: Any = None
        context = RankContext("critic", 0, 1, 0, torch.device("cpu"), control, config)
        ledger, slots = Ledger(), SlotStore()
        self.worker = Worker(context, self.role.role, 1, (), ledger, slots)
        self.worker.claim.take("run", 1)
        self.commands = [
            *self.role.commands(),
            *Lifecycle(self.role, context, ledger, slots).commands(),
        ]
        self.failure = RecordedFailureWatch()
        failure: Any = self.failure
        self.leader = Leader(self.commands, ControlChannel(0, 1), failure, self.worker, idle_interval_s=0.0)
        self.run_dir = run_dir

    def submit(self, method: str, *, base_step: int = 0, epoch: int = 1, request_id: str = "", **fields: Any) -> Call:
        command = next(command for command in self.commands if command.method == method)
        header = worker_pb2.CommandHeader(
            run_id="run", epoch=epoch, base_step=base_step, request_id=request_id or f"{method}-{base_step}"
        )
        call = Call(command, command.request_type(header=header, **fields))
        return self.worker.mailbox.admit(call, lambda: self.worker.ledger.reply_of(call.request_id))

    def work(self) -> None:
        """Runs what is in the mailbox."""
        while self.worker.mailbox.num_queued:
            call = self.worker.mailbox.take(0.0)
            assert call is not None
            self.leader.answer(call)

    def do(self, method: str, **fields: Any) -> worker_pb2.CommandResult:
        call = self.submit(method, **fields)
        self.work()
        call.wait(20)
        return call.result()

    def directory(self, step: int) -> Path:
        return self.run_dir / "checkpoints" / f"global_step_{step}" / "critic"

    def save(self, step: int) -> None:
        """Updates to `step`, and saves it."""
        self.update(step)
        self.role.durable.set_result("weights")
        self.do("SaveCheckpoint", base_step=step)

    def update(self, step: int) -> worker_pb2.CommandResult:
        self.worker.slots.put(experience(step), ROWS, step - 1)
        return self.do("Update", base_step=step - 1, slot=experience(step))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    return Service(tmp_path)


def raises(*_: Any, error: BaseException) -> None:
    raise error


def test_columns_go_into_the_slot_and_progress_to_the_caller(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.metrics = {"mean": torch.tensor(2.5)}
    call = service.submit("ComputeValues", slot=experience(1))
    service.work()
    assert call.progress == worker_pb2.Progress(done=1, total=1, phase="values")
    assert dict(call.result().metrics) == {"mean": 2.5}
    assert call.result().engine_time.finished_unix_ns >= call.result().engine_time.started_unix_ns > 0
    assert service.worker.slots.get(experience(1))["values"].values.tolist() == [4.0, 5.0, 6.0]


def test_an_update_commits_its_step_and_drops_its_experience(service: Service) -> None:
    assert service.update(1).committed_step == 1
    assert service.worker.ledger.committed_step == 1
    assert service.worker.slots.slots() == []
    assert service.do("ComputeWeightsDigest", base_step=1).weights_sha256 == "1"


def test_an_applied_update_is_answered_from_the_ledger_and_not_applied_again(service: Service) -> None:
    first = service.update(1)
    again = service.do("Update", base_step=0, slot=experience(1))
    assert again.replayed
    assert again.engine_time == first.engine_time
    assert float(service.role.weights.detach()) == 1.0


def test_steps_are_checked_when_a_command_leaves_the_mailbox_not_on_arrival(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.worker.slots.put(experience(2), ROWS, 0)
    update = service.submit("Update", base_step=0, slot=experience(1))
    ahead = service.submit("ComputeValues", base_step=1, slot=experience(2))
    late = service.submit("ComputeValues", base_step=0, slot=experience(2), request_id="late")
    service.work()
    assert update.result().committed_step == 1
    assert ahead.result().committed_step == 1
    with pytest.raises(WrongStep, match="expects committed step 0, it is 1"):
        late.result()


@pytest.mark.parametrize("step", [2, 3])
def test_an_update_must_be_of_the_next_step(service: Service, step: int) -> None:
    with pytest.raises(WrongStep, match="step 1 comes next"):
        service.do("Update", base_step=0, slot=experience(step))


def test_a_controller_that_was_replaced_while_its_command_waited_is_refused(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    call = service.submit("Update", slot=experience(1))
    service.worker.claim.take("run", 2)
    service.work()
    with pytest.raises(StaleEpoch):
        call.result()
    assert service.worker.ledger.committed_step == 0


def test_a_missing_slot_and_missing_columns_are_refused(service: Service) -> None:
    with pytest.raises(NotFound, match="experience slot of step 1"):
        service.do("ComputeValues", slot=experience(1))
    service.worker.slots.put(experience(1), ROWS.select(["prompts"]), 0)
    with pytest.raises(WrongState, match="lacks responses; it has prompts"):
        service.do("ComputeValues", slot=experience(1))
    service.worker.slots.put(experience(2), Batch.from_rows(prompts=[], responses=[]), 0)
    with pytest.raises(InvalidArgument, match="no rows"):
        service.do("ComputeValues", slot=experience(2))


def test_what_prepare_refuses_is_the_callers_mistake(service: Service) -> None:
    service.worker.slots.put(experience(1), Batch.from_rows(prompts=[[101]], responses=[[1]]), 0)
    with pytest.raises(InvalidArgument, match="over 100"):
        service.do("ComputeValues", slot=experience(1))
    assert service.worker.is_serving


def test_an_error_of_the_engine_is_our_bug_and_the_group_of_one_goes_on(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.before_step = lambda: raises(error=ValueError("shapes differ"))
    with pytest.raises(Internal, match="ValueError: shapes differ"):
        service.do("ComputeValues", slot=experience(1))
    service.role.before_step = lambda: None
    assert service.do("ComputeValues", slot=experience(1)).committed_step == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("1 TiB"), MemoryError("1 TiB")])
@pytest.mark.parametrize("method", ["ComputeValues", "Update"])
def test_out_of_memory_before_the_first_optimizer_step_leaves_the_service_clean(
    service: Service, error: Exception, method: str
) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.before_step = lambda: raises(error=error)
    with pytest.raises(OutOfMemory, match="1 TiB"):
        service.do(method, slot=experience(1))
    service.role.before_step = lambda: None
    assert service.update(1).committed_step == 1


def test_a_bug_before_the_first_optimizer_step_leaves_the_service_clean(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.before_step = lambda: raises(error=RuntimeError("broken"))
    with pytest.raises(Internal, match="broken"):
        service.do("Update", slot=experience(1))
    service.role.before_step = lambda: None
    assert service.update(1).committed_step == 1
    assert float(service.role.weights.detach()) == 1.0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("1 TiB"), RuntimeError("broken")])
def test_an_update_that_failed_after_an_optimizer_step_leaves_it_dirty(service: Service, error: Exception) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.after_step = lambda: raises(error=error)
    with pytest.raises(Internal):
        service.do("Update", slot=experience(1))
    assert service.worker.state == worker_pb2.WORKER_STATE_DIRTY
    with pytest.raises(Dirty, match=r"Update failed half-way.*only GetStatus and LoadCheckpoint"):
        service.do("ComputeValues", slot=experience(1))
    service.do("LoadCheckpoint", step=0)
    assert service.worker.is_serving
    assert service.worker.slots.slots() == []


def test_metrics_that_are_no_numbers_make_an_update_fail(service: Service) -> None:
    service.role.metrics = {"loss": "high"}
    with pytest.raises(Internal):
        service.update(1)
    assert service.worker.state == worker_pb2.WORKER_STATE_DIRTY


def test_an_update_that_cannot_be_entered_into_the_ledger_leaves_it_dirty(service: Service) -> None:
    service.role.metrics = {"a name that no message can hold: \ud800": 1.0}
    with pytest.raises(Internal):
        service.update(1)
    assert service.worker.state == worker_pb2.WORKER_STATE_DIRTY
    with pytest.raises(Dirty):
        service.update(1)
    assert float(service.role.weights.detach()) == 1.0


def test_the_mailbox_goes_on_while_a_checkpoint_is_written(service: Service) -> None:
    service.update(1)
    saving = service.submit("SaveCheckpoint", base_step=1)
    service.work()
    assert service.update(2).committed_step == 2
    assert not saving.is_done
    service.role.durable.set_result("weights")
    saving.wait(20)
    manifest = service.directory(1) / "manifest.json"
    assert saving.result().committed_step == 1
    assert saving.result().manifest_sha256 == hashlib.sha256(manifest.read_bytes()).hexdigest()


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
    saving.wait(20)
    with pytest.raises(StorageFailed, match=sentence):
        saving.result()
    assert not (service.directory(0) / "manifest.json").exists()
    assert service.worker.is_serving


def test_a_bug_in_a_save_is_no_storage_that_failed(service: Service) -> None:
    service.role.durable.set_exception(RuntimeError("a shard has no name"))
    with pytest.raises(Internal, match="a shard has no name"):
        service.do("SaveCheckpoint")


@pytest.fixture
def leader_of_two(service: Service) -> Leader:
    """A leader whose other rank hears, and has nothing to say."""
    failure: Any = service.failure
    return Leader(service.commands, SilentPeer(), failure, service.worker, idle_interval_s=0.0)


class SilentPeer(ControlChannel):
    """The channel of rank 0 of two; the other rank has no columns to send."""

    def __init__(self) -> None:
        super().__init__(0, 2)

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
    wait_until(lambda: service.failure.endings or saving.is_done, what="the end of the save")
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


def test_a_group_of_one_ends_with_its_device(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    broken = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    service.role.before_step = lambda: raises(error=broken)
    with pytest.raises(GroupEnded):
        service.do("ComputeValues", slot=experience(1))
    assert service.failure.endings == [(broken, Place(method="ComputeValues", step=1))]


def test_a_group_of_one_ends_when_a_load_fails_by_itself(service: Service) -> None:
    service.role.before_load = lambda: raises(error=RuntimeError("no room for the weights"))
    with pytest.raises(GroupEnded):
        service.do("LoadCheckpoint", step=0)


def reports_parts(*parts: int) -> Callable[[Batch, Any], None]:
    """Reports these parts, in this order."""

    def work(batch: Batch, report: Any) -> None:
        for part in parts:
            rows = batch.take(np.flatnonzero(batch["groups"].values == part - 1))
            values = Batch(rows.num_rows, {"values": replace_dtype(rows)})
            report.part_ready(part, values, policy_version=5)

    return work


def gives_up(batch: Batch, report: Any) -> None:
    assert report.is_cancelled
    raise CommandCancelled


def part_of_step_1(part: int) -> batch_pb2.Slot:
    return batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=1, part=part)


def test_parts_can_be_fetched_and_are_announced_in_the_order_in_which_they_end(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.groups, service.role.working = [0, 1], reports_parts(2, 1)
    call = service.submit("ComputeValues", slot=experience(1))
    service.work()
    assert [(part.part, part.num_parts, part.policy_version) for part in call.parts] == [(2, 2, 5), (1, 2, 5)]
    assert call.result().policy_version == 5
    assert service.worker.slots.get(part_of_step_1(2))["values"].values.tolist() == [5.0, 6.0]
    whole = service.worker.slots.get(experience(1))
    assert whole["values"].values.tolist() == [4.0, 5.0, 6.0]
    assert "groups" not in whole


def test_a_streamed_command_that_leaves_a_part_out_has_a_bug(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.groups, service.role.working = [0, 1], reports_parts(2)
    with pytest.raises(Internal, match=r"without its parts \[1\]"):
        service.do("ComputeValues", slot=experience(1))


def test_parts_of_a_command_that_is_not_streamed_are_a_bug(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.working = lambda batch, report: report.part_ready(1, batch, policy_version=0)
    with pytest.raises(Internal, match="not streamed"):
        service.do("ComputeValues", slot=experience(1))


def test_an_evaluation_is_not_worked_on_in_parts(service: Service) -> None:
    slot = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EVALUATION, step=0)
    service.worker.slots.put(slot, ROWS, 0)
    service.role.groups = [0, 1]
    with pytest.raises(InvalidArgument, match="only a whole experience slot"):
        service.do("ComputeValues", slot=slot)


def test_nothing_is_kept_of_a_cancelled_command_and_the_service_goes_on(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    call = service.submit("ComputeValues", slot=experience(1))

    def work(batch: Batch, report: Any) -> None:
        reports_parts(1)(batch, report)
        call.cancel("a checkpoint is being loaded")
        reports_parts(2)(batch, report)
        gives_up(batch, report)

    service.role.groups, service.role.working = [0, 1], work
    service.work()
    with pytest.raises(Unavailable, match="cancelled: a checkpoint is being loaded"):
        call.result()
    assert service.worker.slots.slots() == [experience(1)]
    assert "values" not in service.worker.slots.get(experience(1))
    service.role.groups, service.role.working = [], lambda batch, report: None
    assert service.do("ComputeValues", slot=experience(1)).committed_step == 0


def test_a_command_that_is_finished_before_it_notices_is_answered(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    call = service.submit("ComputeValues", slot=experience(1))

    def work(batch: Batch, report: Any) -> None:
        call.cancel("too late")
        reports_parts(1, 2)(batch, report)

    service.role.groups, service.role.working = [0, 1], work
    service.work()
    assert call.result().committed_step == 0
    assert [part.part for part in call.parts] == [1, 2]
    assert service.worker.slots.get(part_of_step_1(2)).num_rows == 1


def test_a_command_that_gives_up_without_being_asked_has_a_bug(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.working = lambda batch, report: raises(error=CommandCancelled())
    with pytest.raises(Internal, match="gave ComputeValues up, but it was not cancelled"):
        service.do("ComputeValues", slot=experience(1))


class RecordedChannel(ControlChannel):
    """What rank 0 of two announces, and to nobody."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.announced: list[OrderKind] = []

    def announce(self, order: Order) -> None:
        self.announced.append(order.kind)


class QuietFailureWatch:
    """Knows that the group leaves in good order."""

    has_stopped = False

    def stop(self) -> None:
        self.has_stopped = True


class DrainedAfterThreeTakes(Mailbox):
    """Nobody calls; the third time that it is asked, the service drains."""

    num_takes = 0

    def take(self, timeout_s: float) -> Call | None:
        self.num_takes += 1
        if self.num_takes == 3:
            self.close(draining())
        return super().take(timeout_s)


def test_an_idle_leader_gives_signs_of_life_and_says_when_to_leave(service: Service) -> None:
    channel, failure = RecordedChannel(), QuietFailureWatch()
    service.worker.mailbox = DrainedAfterThreeTakes(1)
    watch: Any = failure
    Leader(service.commands, channel, watch, service.worker, idle_interval_s=0.0).serve()
    assert channel.announced == [OrderKind.NOTHING, OrderKind.NOTHING, OrderKind.LEAVE]
    assert failure.has_stopped
