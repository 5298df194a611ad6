"""The loop that rank 0's main thread runs: one command after the other, on all ranks together.

    rank 0                                                   ranks 1..N-1 (follower.py)
    take the next call from the mailbox
    check who asks, and for which step (admission.py)
    select its rows, let the role prepare them
    announce the command            --- order ------------>  hear the order
    deal out the rows               --- rows ------------->  receive own rows
    run                             <-- parts -------------  run (a streamed command; parts.py)
    collect the results             <-- columns -----------  send own columns
    restore the order of the rows
    keep them in the slot, commit
    answer

When there is nothing to do, rank 0 says so every few seconds, lest the others take it for dead. Whatever can be
refused is refused before the order goes out. A rank that fails afterwards ends the group (failure.py), because the
others wait for it; a group of one rank can go on, unless its device is broken or its weights are in an unknown state. A
command that nobody needs any more is no failure: every rank gives it up when it hears of it, or finishes it, and
nothing is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.shell.activity import Activity
from services.shell.admission import check_identity, prepared_rows
from services.shell.collectives import ControlChannel, Order, OrderKind
from services.shell.commands import Command, CommandCancelled, Outcome, step_of
from services.shell.failure import FailureWatch, StepCounter, cannot_go_on, cannot_save, is_out_of_memory
from services.shell.lifecycle import DURABLE_TIMEOUT_S, LifecycleCommand, attachment_of
from services.shell.logs import working_on
from services.shell.mailbox import Call, MailboxClosed
from services.shell.parts import PartGatherer, received_parts
from services.shell.reports import LeaderReport
from services.shell.sharding import check_shards, join_shards, shard_by_tokens
from services.shell.worker import Worker
from splitppo import failpoints
from splitppo.batch import Batch
from splitppo.rpc.errors import Internal, OutOfMemory, Place, Unavailable, WireError, wire_error
from splitppo.v1 import worker_pb2

log = logging.getLogger(__name__)

# The rows of each rank.
Shards = Sequence[NDArray[np.int64]]

IDLE_INTERVAL_S = 5.0


class Leader:
    """Rank 0: takes calls from the mailbox and leads the group through them.

    Args:
        commands: the table of commands, the same on every rank.
        channel: for orders and rows.
        failure: of this rank.
        worker: what is shared with the gRPC thread.
        parts_channel: on a process group of its own, for what the ranks send while they work.
        activity: of this rank.
        idle_interval_s: between signs of life.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        channel: ControlChannel,
        failure: FailureWatch,
        worker: Worker,
        *,
        parts_channel: ControlChannel | None = None,
        activity: Activity | None = None,
        idle_interval_s: float = IDLE_INTERVAL_S,
    ) -> None:
        self._commands = commands
        self._channel = channel
        self._parts_channel = parts_channel or ControlChannel(0, 1)
        self._activity = activity or Activity()
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
                request = call.request
                with self._activity.command(call.place), working_on(request), failpoints.at_step(step_of(request)):
                    self.answer(call)
        self._worker.mailbox.wait_open(DURABLE_TIMEOUT_S)
        self._failure.stop()
        self._announce(Order(OrderKind.LEAVE))

    def answer(self, call: Call) -> None:
        """Runs a call that has left the mailbox, up to its reply or its error."""
        log.info("%s begins", call.command.method)
        try:
            check_identity(self._worker, call)
            rows = prepared_rows(self._worker, call)
            shards = self._shards(call.command, rows)
            started_ns = time.time_ns()
            outcome, results = self._run(call, rows, shards)
            engine_time = worker_pb2.EngineTime(started_unix_ns=started_ns, finished_unix_ns=time.time_ns())
            try:
                reply = self._keep(call, outcome, shards, results, engine_time)
            except Exception as error:
                if not call.command.commits:
                    raise
                because = f"{call.command.method} is in no ledger ({type(error).__name__}: {error})"
                self._worker.mark_dirty(because)
                raise Internal(because) from error
            if call.command.commits:
                failpoints.hit(f"{call.command.point}.committed")
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

    def _answer_when_durable(self, call: Call, reply: worker_pb2.CommandResult, durable: Future[str]) -> None:
        error = durable.exception()
        if error is None:
            reply.manifest_sha256 = durable.result()
            self._worker.remember_save(call.request_id, reply)
            call.resolve(reply)
        else:
            if cannot_save(error, num_ranks=self._channel.world_size):
                self._failure.end_group(error, call.place)
            refusal = wire_error(error)
            bug = error if isinstance(refusal, Internal) else None
            log.error("%s could not be made durable: %s", call.command.method, refusal.message, exc_info=bug)
            call.fail(refusal)

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

        Raises:
            Unavailable: it was cancelled, and not every rank had finished it before; nothing of it is kept.
            WireError: it failed.
        """
        steps_before = self._steps.num_steps
        gatherer = self._gatherer(call, rows, shards)
        try:
            share = self._deal(call, rows, shards)
            outcome: Outcome | None = None
            with self._received_parts(call, gatherer), suppress(CommandCancelled):
                failpoints.hit(f"{call.command.point}.begin")
                outcome = call.command.run(call.request, share, LeaderReport(call, gatherer, self._activity))
                outcome = replace(outcome, metrics={name: float(value) for name, value in outcome.metrics.items()})
            results = self._results(outcome)
            if results is None and not call.cancelled_because:
                raise RuntimeError(f"a rank gave {call.command.method} up, but it was not cancelled")
            if results is not None and gatherer is not None and gatherer.missing:
                raise RuntimeError(f"{call.command.method} has ended without its parts {gatherer.missing}")
        except Exception as error:
            raise self._after_failure(call, error, has_stepped=self._steps.num_steps > steps_before) from error
        if outcome is None or results is None:
            if gatherer is not None:
                self._worker.slots.drop_parts(call.request.slot)
            raise Unavailable(f"the command was cancelled: {call.cancelled_because}")
        return outcome, results if shards else []

    def _results(self, outcome: Outcome | None) -> list[Batch | None] | None:
        """The columns of every rank; None if one of them, rank 0 (no outcome) included, has given the command up."""
        results: list[Batch | None] = [outcome.columns if outcome else None]
        is_complete = outcome is not None
        for rank in range(1, self._channel.world_size):
            try:
                results.append(self._channel.receive(rank))
            except CommandCancelled:
                is_complete = False
        return results if is_complete else None

    def _gatherer(self, call: Call, rows: Batch | None, shards: Shards) -> PartGatherer | None:
        """What puts the parts of a streamed command together; None for any other one."""
        if rows is None or "groups" not in rows:
            return None
        self._worker.slots.drop_parts(call.request.slot)  # of an attempt that failed

        def deliver(part: int, columns: Batch, policy_version: int) -> None:
            # Also after a cancellation: all ranks may have finished before they hear of it.
            self._worker.slots.add_part(call.request.slot, part, columns)
            call.part_ready(worker_pb2.PartReady(part=part, num_parts=num_parts, policy_version=policy_version))

        gatherer = PartGatherer(shards, rows["groups"].values, deliver)
        num_parts = gatherer.num_parts
        return gatherer

    def _received_parts(self, call: Call, gatherer: PartGatherer | None) -> AbstractContextManager[None]:
        if gatherer is None:
            return nullcontext()
        return received_parts(self._parts_channel, gatherer, lambda error: self._failure.end_group(error, call.place))

    def _deal(self, call: Call, rows: Batch | None, shards: Shards) -> Any:
        """Announces the command, sends each rank its rows, and returns what is for this rank."""
        command = call.command
        attachment = command.attach() if isinstance(command, LifecycleCommand) else b""
        request = call.request.SerializeToString()
        self._announce(Order(OrderKind.COMMAND, self._commands.index(command), rows is not None, request, attachment))
        if command.cancellable and self._channel.world_size > 1:
            order = self._channel.sequence
            call.on_cancel(lambda: self._failure.cancel(order))
        if rows is None:
            return attachment_of(command, attachment)
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
        if cannot_go_on(error, num_ranks=self._channel.world_size, repairs=command.repairs):
            self._failure.end_group(error, call.place)
        log.error("%s failed in the engine", command.method, exc_info=error)
        if is_out_of_memory(error) and not has_stepped and not command.repairs:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return OutOfMemory(f"out of memory: {error}", Place(rank=0))
        if (command.commits and has_stepped) or command.repairs:
            self._worker.mark_dirty(f"{command.method} failed half-way ({type(error).__name__}: {error})")
        if isinstance(error, WireError) or command.repairs:
            return wire_error(error, Place(rank=0))
        return Internal(f"{type(error).__name__}: {error}", Place(rank=0))

    def _keep(
        self,
        call: Call,
        outcome: Outcome,
        shards: Shards,
        results: Sequence[Batch | None],
        engine_time: worker_pb2.EngineTime,
    ) -> worker_pb2.CommandResult:
        """Enters what the command made: columns into the slot; an update into the ledger, or it would come again."""
        worker, command = self._worker, call.command
        step = worker.ledger.committed_step + (1 if command.commits else 0)
        reply = worker_pb2.CommandResult(
            engine_time=engine_time,
            metrics=outcome.metrics,
            committed_step=step,
            weights_sha256=outcome.weights_sha256,
            policy_version=outcome.policy_version,
        )
        if command.commits:
            worker.ledger.commit(step, call.request_id, reply)
            worker.slots.commit(step)
        elif (columns := join_shards(shards, results)) is not None:
            worker.slots.absorb(call.request.slot, columns, call.reply_key, reply)
        if command.repairs:
            worker.mark_clean()
        return reply
