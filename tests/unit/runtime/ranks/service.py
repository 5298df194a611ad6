"""A leader without followers whose role is a counter: a service's commands in one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from services.runtime.command import Command, Effect, MessageRouter, Messages, Outcome, Rows
from services.runtime.context import RankContext
from services.runtime.failures.heartbeat import Activity
from services.runtime.ranks.checkpoint_commands import CheckpointCommands, no_checkpoint_commands
from services.runtime.ranks.control_channel import ControlChannel
from services.runtime.ranks.leader import Leader
from services.runtime.role import Role
from services.runtime.state.batch_store import BatchStore
from services.runtime.state.command_call import CommandCall
from services.runtime.state.ledger import Ledger
from services.runtime.state.worker import Worker
from splitppo.batch import Batch
from splitppo.config.load import validate
from splitppo.rpc.errors import Place
from splitppo.v1 import batch_pb2, conversation_pb2, critic_pb2, worker_pb2
from tests.support.command_calls import result_of

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
        self.update_columns: Batch | None = None
        self.num_parts = 0
        self.working: Callable[[Batch, Any], None] = lambda batch, report: None
        self.router: MessageRouter | None = None
        self.durable: Future[str] = Future()

    def commands(self) -> tuple[Command, Command]:
        return (
            Command(
                "ComputeValues",
                critic_pb2.ComputeValuesRequest,
                Effect.WRITES_SLOT,
                self.compute_values,
                Rows(
                    columns=("prompts", "responses"),
                    optional_columns=("values",),
                    prepare=self.prepare,
                    num_parts=lambda _: self.num_parts,
                ),
                messages=Messages(
                    "Reply",
                    conversation_pb2.ReplyResponse,
                    are_exchanged=lambda _: self.router is not None,
                    open=lambda *_: self.open_router(),
                ),
            ),
            Command("Update", critic_pb2.CriticUpdateRequest, Effect.TRAINS, self.update, Rows(columns=("prompts",))),
        )

    def open_router(self) -> MessageRouter:
        assert self.router is not None
        return self.router

    def prepare(self, request: Any, batch: Batch) -> Batch:
        if int(batch["prompts"].values[0]) > 100:
            raise ValueError("the first token is over 100")
        if self.num_parts:
            return batch.merge(Batch.from_rows(places=[[place] for place in range(batch.num_rows)]))
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
        return Outcome(columns=self.update_columns, metrics=self.metrics)

    def save_checkpoint(self, directory: Path, service_state: bytes, *, with_hf_model: bool) -> Future[str]:
        (directory / "state").write_bytes(service_state)
        return self.durable

    def check_checkpoint(self, directory: Path) -> None:
        if not (directory / "state").exists():
            raise ValueError(f"{directory} is torn")

    def load_checkpoint(self, directory: Path | None, progress: object = None) -> bytes:
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
    """Records the failure with which the group ends."""

    def __init__(self) -> None:
        self.endings: list[tuple[BaseException, Place]] = []

    def end_group(self, error: BaseException, place: Place) -> NoReturn:
        self.endings.append((error, place))
        raise GroupEnded


def new_leader(worker: Worker, channel: ControlChannel, failure: Any) -> Leader:
    """A leader that never waits for a call."""
    alone = ControlChannel(1)
    return Leader(worker, channel, side_channel=alone, failure=failure, activity=Activity(), idle_interval_s=0.0)


class Service:
    """A leader without followers; `do` runs one call through command queue and engine.

    Args:
        trains: else it has neither ledger nor checkpoints.
        sampler: the role, in place of a counter; its versions are the steps of the service.
    """

    def __init__(self, run_dir: Path, *, trains: bool = True, sampler: Role | None = None) -> None:
        config = validate(
            {
                "run": {"dir": str(run_dir), "total_steps": 1},
                "data": {"train_files": "x", "train_batch_size": 1},
                "actor": {"model": "x"},
            },
            "test",
        )
        self.role = Counter()
        role, name = sampler or self.role, "rollout" if sampler else "critic"
        control: Any = None
        context = RankContext(name, 0, 1, torch.device("cpu"), control, config)
        ledger, slots = Ledger(-1 if sampler else 0), BatchStore()
        checkpoints = CheckpointCommands(self.role, context, ledger).commands()
        has_checkpoints = trains and sampler is None
        self.commands = [*role.commands(), *(checkpoints if has_checkpoints else no_checkpoint_commands(name))]
        ledger_of_service = ledger if trains or sampler else None
        self.worker = Worker(context, role.role, 1, (), ledger_of_service, slots, self.commands)
        self.worker.fencing.take("run", 1)
        self.failure = RecordedFailureWatch()
        failure: Any = self.failure
        self.leader = new_leader(self.worker, ControlChannel(1), failure)
        self.run_dir = run_dir

    def submit(
        self, method: str, *, base_step: int = 0, epoch: int = 1, request_id: str = "", **fields: Any
    ) -> CommandCall:
        command = next(command for command in self.commands if command.method == method)
        header = worker_pb2.CommandHeader(
            run_id="run", epoch=epoch, base_step=base_step, request_id=request_id or f"{method}-{base_step}"
        )
        call = CommandCall(command, command.request_type(header=header, **fields))
        return self.worker.command_queue.admit(call, self.worker.stored_reply)

    def work(self) -> None:
        """Runs what is in the command queue."""
        while self.worker.command_queue.num_queued:
            call = self.worker.command_queue.take(0.0)
            assert call is not None
            self.leader.answer(call)

    def do(self, method: str, **fields: Any) -> worker_pb2.CommandResult:
        call = self.submit(method, **fields)
        self.work()
        call.answered.wait(20)
        return result_of(call)

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


def raises(*_: Any, error: BaseException) -> None:
    raise error
