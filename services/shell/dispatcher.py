"""The loop that the main thread of every rank runs: one command after the other, on all ranks together.

    rank 0                                                   ranks 1..N-1
    take the next call from the mailbox
    check who asks, and for which step
    select its rows, let the role prepare them
    announce the command            --- order ------------>  hear the order
    deal out the rows               --- rows ------------->  receive own rows
    run                                                      run
    collect the results             <-- columns -----------  send own columns
    restore the order of the rows
    keep them in the slot, commit
    answer

When there is nothing to do, rank 0 says so every few seconds, lest the others take it for dead. Whatever can be
refused is refused before the order goes out. A rank that fails afterwards ends the group (failure.py), because the
others wait for it; a group of one rank can go on, unless its weights are in an unknown state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.shell.collectives import ControlChannel, Order, OrderKind
from services.shell.commands import Command, Outcome
from services.shell.failure import FailureWatch, StepCounter, is_out_of_memory
from services.shell.lifecycle import LifecycleCommand
from services.shell.logs import working_on
from services.shell.mailbox import Call, MailboxClosed
from services.shell.sharding import check_shards, join_shards, shard_by_tokens
from services.shell.worker import Worker
from splitppo.batch import Batch
from splitppo.rpc.errors import (
    Internal,
    InvalidArgument,
    OutOfMemory,
    Place,
    WireError,
    WrongState,
    WrongStep,
    wire_error,
)
from splitppo.v1 import worker_pb2

log = logging.getLogger(__name__)

# The rows of each rank.
Shards = Sequence[NDArray[np.int64]]

IDLE_INTERVAL_S = 5.0
# After the last command, checkpoints that are still being written get this long.
_DURABLE_TIMEOUT_S = 25.0


class Leader:
    """Rank 0: takes calls from the mailbox and leads the group through them."""

    def __init__(
        self,
        commands: Sequence[Command],
        channel: ControlChannel,
        failure: FailureWatch,
        worker: Worker,
        idle_interval_s: float = IDLE_INTERVAL_S,
    ) -> None:
        self._commands = commands
        self._channel = channel
        self._failure = failure
        self._worker = worker
        self._idle_interval_s = idle_interval_s
        self._steps = StepCounter()

    def serve(self) -> None:
        """Returns when the service has been drained. Ends the process if a rank fails."""
        while True:
            try:
                call = self._worker.mailbox.take(self._idle_interval_s)
            except MailboxClosed:
                break
            if call is None:
                self._announce(Order(OrderKind.NOTHING))
            else:
                with working_on(call.request):
                    self.answer(call)
        self._worker.mailbox.wait_open(_DURABLE_TIMEOUT_S)
        self._failure.stop()
        self._announce(Order(OrderKind.LEAVE))

    def answer(self, call: Call) -> None:
        """Runs a call that has left the mailbox, up to its reply or its error."""
        log.info("%s begins", call.command.method)
        try:
            self._check_identity(call)
            rows = self._prepared_rows(call)
            shards = self._shards(call.command, rows)
            started_ns = time.time_ns()
            outcome, parts = self._run(call, rows, shards)
            engine_time = worker_pb2.EngineTime(started_unix_ns=started_ns, finished_unix_ns=time.time_ns())
            reply = self._keep(call, outcome, shards, parts, engine_time)
        except Exception as error:
            refusal = wire_error(error)
            level, bug = (logging.ERROR, error) if isinstance(refusal, Internal) else (logging.WARNING, None)
            log.log(level, "%s failed: %s", call.command.method, refusal.message, exc_info=bug)
            call.fail(refusal)
            return
        seconds = (engine_time.finished_unix_ns - engine_time.started_unix_ns) / 1e9
        log.info("%s done in %.3f s", call.command.method, seconds)
        if outcome.durable is None:
            call.resolve(reply)
        else:
            outcome.durable.add_done_callback(lambda durable: self._answer_when_durable(call, reply, durable))

    def _answer_when_durable(self, call: Call, reply: worker_pb2.CommandResult, durable: Future[None]) -> None:
        error = durable.exception()
        if error is None:
            self._worker.remember_save(call.request_id, reply)
            call.resolve(reply)
        else:
            log.error("%s could not be made durable", call.command.method, exc_info=error)
            call.fail(wire_error(error))

    def _check_identity(self, call: Call) -> None:
        """The caller must be the newest controller, and mean the step that this service is at."""
        header, command, committed = call.request.header, call.command, self._worker.ledger.committed_step
        self._worker.claim.check(header.run_id, header.epoch)
        if not _repairs(command):
            self._worker.check_clean()
        if header.base_step != committed:
            raise WrongStep(f"the caller expects committed step {header.base_step}, it is {committed}")
        if command.commits and call.request.slot.step != committed + 1:
            raise WrongStep(f"step {call.request.slot.step} cannot be committed, step {committed + 1} comes next")

    def _prepared_rows(self, call: Call) -> Batch | None:
        """The columns of the slot that the command needs, checked and completed by the role."""
        command = call.command
        if isinstance(command, LifecycleCommand) and command.check is not None:
            command.check(call.request)
        if not call.works_on_slot:
            return None
        stored = self._worker.slots.get(call.request.slot)
        if missing := [name for name in command.columns if name not in stored]:
            raise WrongState(f"the slot lacks {', '.join(missing)}; it has {', '.join(stored.columns)}")
        if stored.num_rows == 0:
            raise InvalidArgument("the slot has no rows")
        optional = [name for name in command.optional_columns if name in stored and name not in command.columns]
        rows = stored.select([*command.columns, *optional])
        return command.prepare(call.request, rows) if command.prepare else rows

    def _shards(self, command: Command, rows: Batch | None) -> Shards:
        """Which rows each rank works on."""
        num_ranks = self._channel.world_size
        if rows is None:
            return []
        if num_ranks == 1:
            return [np.arange(rows.num_rows)]
        shards = (command.shard or shard_by_tokens)(rows, num_ranks)
        check_shards(shards, rows.num_rows, num_ranks)
        return shards

    def _run(self, call: Call, rows: Batch | None, shards: Shards) -> tuple[Outcome, list[Batch | None]]:
        """Runs the command on all ranks; returns rank 0's outcome, and the columns that each rank has made.

        From the announcement on the others take part: an error in here ends the group, unless it is a group of one.
        """
        steps_before = self._steps.num_steps
        try:
            share = self._deal(call, rows, shards)
            outcome = call.command.run(call.request, share, call.report)
            outcome = replace(outcome, metrics={name: float(value) for name, value in outcome.metrics.items()})
            others = [self._channel.receive(rank) for rank in range(1, self._channel.world_size)]
        except Exception as error:
            raise self._after_failure(call, error, has_stepped=self._steps.num_steps > steps_before) from error
        return outcome, [outcome.columns, *others] if shards else []

    def _deal(self, call: Call, rows: Batch | None, shards: Shards) -> Any:
        """Announces the command, sends each rank its rows, and returns what is for this rank."""
        command = call.command
        attachment = command.attach() if isinstance(command, LifecycleCommand) else b""
        request = call.request.SerializeToString()
        self._announce(Order(OrderKind.COMMAND, self._commands.index(command), rows is not None, request, attachment))
        if rows is None:
            return _attachment(command, attachment)
        if len(shards) == 1:
            return rows
        shares = [rows.take(shard) for shard in shards]
        self._channel.scatter(shares)
        return shares[0]

    def _announce(self, order: Order) -> None:
        """Tells the other ranks what comes next; if they cannot be told, the group ends."""
        try:
            self._channel.announce(order)
        except RuntimeError as error:
            self._failure.end_group(error, Place())

    def _after_failure(self, call: Call, error: Exception, *, has_stepped: bool) -> WireError:
        """What the caller hears about a command that failed in the engine, if the group can go on at all."""
        command = call.command
        if self._channel.world_size > 1:
            self._failure.end_group(error, call.place)
        log.error("%s failed in the engine", command.method, exc_info=error)
        if is_out_of_memory(error) and not has_stepped and not _repairs(command):
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return OutOfMemory(f"out of memory: {error}", Place(rank=0))
        if command.commits or _repairs(command):
            self._worker.mark_dirty(f"{command.method} failed half-way ({type(error).__name__}: {error})")
        if isinstance(error, WireError) or _repairs(command):
            return wire_error(error, Place(rank=0))
        return Internal(f"{type(error).__name__}: {error}", Place(rank=0))

    def _keep(
        self,
        call: Call,
        outcome: Outcome,
        shards: Shards,
        parts: Sequence[Batch | None],
        engine_time: worker_pb2.EngineTime,
    ) -> worker_pb2.CommandResult:
        """Enters what the command made: an update into the ledger, columns into the slot."""
        worker, command = self._worker, call.command
        step = worker.ledger.committed_step + (1 if command.commits else 0)
        reply = worker_pb2.CommandResult(
            engine_time=engine_time, metrics=outcome.metrics, committed_step=step, weights_sha256=outcome.weights_sha256
        )
        if command.commits:
            worker.ledger.commit(step, call.request_id, reply)
            worker.slots.commit(step)
        elif (columns := join_shards(shards, parts)) is not None:
            worker.slots.absorb(call.request.slot, columns, call.request_id, reply)
        if _repairs(command):
            worker.mark_clean()
        return reply


class Follower:
    """Every other rank: does what rank 0 announces."""

    def __init__(self, commands: Sequence[Command], channel: ControlChannel, failure: FailureWatch) -> None:
        self._commands = commands
        self._channel = channel
        self._failure = failure
        self._durable: list[Future[None]] = []
        self._place = Place()

    def serve(self) -> None:
        """Returns when rank 0 announces the end. Ends the process if this or another rank fails."""
        try:
            while (order := self._channel.hear()).kind is not OrderKind.LEAVE:
                if order.kind is OrderKind.COMMAND:
                    self._take_part(order)
        except Exception as error:  # noqa: BLE001 - the edge: the others must not wait for this rank
            self._failure.end_group(error, self._place)
        self._failure.stop()
        wait(self._durable, _DURABLE_TIMEOUT_S)

    def _take_part(self, order: Order) -> None:
        command = self._commands[order.command]
        request = command.request_type.FromString(order.request)
        self._place = Place(method=command.method)
        share: Any = self._channel.receive(0) if order.has_rows else _attachment(command, order.attachment)
        with working_on(request):
            outcome = command.run(request, share, self._note_phase)
        self._channel.send(outcome.columns, 0)
        self._place = Place()
        if outcome.durable is not None:
            outcome.durable.add_done_callback(_log_if_failed)
            self._durable = [*(future for future in self._durable if not future.done()), outcome.durable]

    def _note_phase(self, done: int, total: int, phase: str) -> None:  # noqa: ARG002 - rank 0 streams the numbers
        self._place = Place(method=self._place.method, phase=phase)


def _repairs(command: Command) -> bool:
    """LoadCheckpoint: allowed when the weights are in an unknown state, which it ends."""
    return isinstance(command, LifecycleCommand) and command.repairs


def _attachment(command: Command, attachment: bytes) -> bytes | None:
    return attachment if isinstance(command, LifecycleCommand) else None


def _log_if_failed(durable: Future[None]) -> None:
    if error := durable.exception():
        log.error("this rank's part could not be made durable", exc_info=error)
