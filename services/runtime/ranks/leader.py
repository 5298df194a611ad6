"""Runs the command loop on the main thread of rank 0: one command after the other, on all ranks together.

    rank 0                                                   ranks 1..N-1 (follower.py)
    take the next call from the command queue
    check who asks, and for which step (preconditions.py)
    select its rows, let the role prepare them
    announce the command            --- order ------------>  receive the order
    deal out the rows               --- rows ------------->  receive own rows
    run                             <-- parts, turns ------  run (a streamed command; streaming.py)
                                    --- replies ---------->      (conversations; replies.py)
    collect the results             <-- columns -----------  send own columns
    restore the order of the rows
    keep them in the slot, commit
    answer

When there is nothing to do, rank 0 sends the order NOTHING every few seconds, else the other ranks' wait would time
out. All checks are made before the order is sent. A rank that fails afterwards ends the group (peer_watch.py), because
the others wait for it; a group of one can go on, unless its device is broken or its weights are in an unknown state
(error_policy.py). A command that nobody needs any more is no failure: every rank gives it up when it learns of it, or
finishes it, and nothing is kept.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from services.runtime.failures.error_policy import OptimizerStepCounter, cannot_go_on, cannot_save, engine_error
from services.runtime.failures.heartbeat import Activity
from services.runtime.failures.peer_watch import PeerWatch
from services.runtime.logs import working_on
from services.runtime.ranks.checkpoint_commands import DURABLE_TIMEOUT_S
from services.runtime.ranks.control_channel import LEAVE, NOTHING, ControlChannel, Order
from services.runtime.ranks.preconditions import check_identity, prepared_rows
from services.runtime.ranks.exchange import open_conversations, sending_replies
from services.runtime.ranks.results import keep_result
from services.runtime.ranks.sharding import Indices, join_shards, shard_rows
from services.runtime.ranks.parts import PartGatherer, num_parts_of
from services.runtime.role import Command, CommandCancelled, CommandProgress, Outcome, step_of
from services.runtime.state.command_call import CommandCall
from services.runtime.state.command_queue import CommandQueueClosed
from services.runtime.state.worker import Worker
from splitppo import failpoints
from splitppo.batch import Batch
from splitppo.clock import unix_ns
from splitppo.rpc.errors import Internal, OutOfMemory, Place, Unavailable, WireError, wire_error
from splitppo.user_file import describe
from splitppo.v1 import worker_pb2

log = logging.getLogger(__name__)


@dataclass
class Leader:
    """The command loop of rank 0, which takes calls from the command queue and runs them on all ranks.

    Attributes:
        commands: the table of commands, the same on every rank.
        channel: sends orders and rows to the other ranks.
        parts_channel: carries parts, turns and replies while a command runs, on a process group of its own.
        idle_interval_s: seconds between orders NOTHING, so that the other ranks' wait does not time out.
    """

    commands: Sequence[Command]
    channel: ControlChannel
    failure: PeerWatch
    worker: Worker
    parts_channel: ControlChannel
    activity: Activity
    idle_interval_s: float = 5.0
    steps: OptimizerStepCounter = field(default_factory=OptimizerStepCounter)

    def serve(self) -> None:
        """Runs queued command calls until the service has been drained. Ends the process if a rank fails."""
        with suppress(CommandQueueClosed):
            while True:
                call = self.worker.command_queue.take(self.idle_interval_s)
                if call is None:
                    self._announce(Order(NOTHING))
                    continue
                step = step_of(call.request)
                with self.activity.command(call.place), working_on(step, call.request_id), failpoints.at_step(step):
                    self.answer(call)
        if self.worker.has_failed:
            self.failure.end_group(None, Place())  # waits for the thread that ends it: this is no orderly end
        self.worker.command_queue.wait_open(DURABLE_TIMEOUT_S)
        self.failure.stop()
        self._announce(Order(LEAVE))

    def answer(self, call: CommandCall) -> None:
        """Runs one command call from the queue, and answers the call with a reply or an error."""
        method = call.command.method
        log.info("%s begins", method)
        try:
            check_identity(self.worker, call)
            rows = prepared_rows(self.worker, call)
            started_ns = unix_ns()
            outcome = self._run(call, rows)
            engine_time = worker_pb2.EngineTime(started_unix_ns=started_ns, finished_unix_ns=unix_ns())
            reply = keep_result(self.worker, call, outcome, engine_time)
        except Exception as error:  # noqa: BLE001 - the caller gets every error
            _refuse(call, error, "failed")
            return
        log.info("%s done in %.3f s", method, (engine_time.finished_unix_ns - started_ns) / 1e9)
        if outcome.durable is None:
            call.resolve(reply)
        else:
            outcome.durable.add_done_callback(lambda durable: self._answer_when_durable(call, reply, durable))

    def _answer_when_durable(self, call: CommandCall, reply: worker_pb2.CommandResult, durable: Future[str]) -> None:
        if error := durable.exception():
            if cannot_save(error, num_ranks=self.channel.world_size):
                self.failure.end_group(error, call.place)
            _refuse(call, error, "could not be made durable")
            return
        reply.manifest_sha256 = durable.result()
        if call.command.method == "SaveCheckpoint":
            assert self.worker.ledger is not None, "who saves has a ledger"
            self.worker.ledger.remember_save(call.request_id, call.stored(reply))
        call.resolve(reply)

    def _run(self, call: CommandCall, rows: Batch | None) -> Outcome:
        """Runs the command on all ranks; returns rank 0's outcome with all ranks' columns in the order of `rows`.

        Raises:
            Unavailable: the command was cancelled before every rank had finished it; nothing of it is kept.
            WireError: the command failed.
        """
        command = call.command
        slots = self.worker.slots
        shards = shard_rows(rows, self.channel.world_size, command.shard) if rows is not None else []

        def deliver(part: worker_pb2.PartReady, columns: Batch) -> None:
            # Also after a cancellation: all ranks may have finished before they learn of it.
            slots.add_part(call.request.slot, part.part, columns)
            call.part_ready(part)

        num_parts = num_parts_of(command, call.request, rows)
        call.conversations = open_conversations(call, rows, shards)
        gatherer = PartGatherer(num_parts, self.channel.world_size, deliver)
        steps_before = self.steps.num_steps
        if num_parts:
            slots.drop_parts(call.request.slot)  # of an attempt that failed
        try:
            outcome, results = self._run_on_all_ranks(call, rows, shards, gatherer)
        except CommandCancelled as cancelled:
            if num_parts:
                slots.drop_parts(call.request.slot)
            raise Unavailable(f"the command was cancelled: {call.cancelled_because}") from cancelled
        except Exception as error:
            raise self._after_failure(call, error, has_stepped=self.steps.num_steps > steps_before) from error
        return replace(outcome, columns=None if rows is None else join_shards(shards, results))

    def _run_on_all_ranks(
        self, call: CommandCall, rows: Batch | None, shards: Sequence[Indices], gatherer: PartGatherer
    ) -> tuple[Outcome, list[Batch | None]]:
        """Runs the command on all ranks; returns rank 0's outcome, and the result columns of each rank.

        Raises:
            CommandCancelled: the command was cancelled, and a rank has stopped early.
        """
        command = call.command
        conversations = call.conversations
        outcome = None
        tell = (self.activity.progress, call.report)
        add_own = partial(gatherer.add, 0)
        own = (partial(conversations.turns_ended, 0), conversations.replies[0]) if conversations is not None else ()
        progress = CommandProgress(command.point, tell, add_own, lambda: bool(call.cancelled_because), *own)
        share = self._deal(call, rows, shards)

        def lost(error: Exception) -> None:
            self.failure.end_group(error, call.place)

        parts = gatherer.receiving(self.parts_channel, lost, conversations)
        replies = sending_replies(self.parts_channel, conversations, lost)
        with parts, replies, suppress(CommandCancelled):
            failpoints.hit(f"{command.point}.begin")
            outcome = command.run(call.request, share, progress)
            outcome = replace(outcome, metrics={name: float(value) for name, value in outcome.metrics.items()})
        try:
            results = self.channel.gather(outcome.columns if outcome else None)
            if outcome is None:
                raise CommandCancelled
        except CommandCancelled as given_up:
            if call.cancelled_because:
                raise
            raise RuntimeError(f"a rank gave {command.method} up, but it was not cancelled") from given_up
        if gatherer.missing:
            raise RuntimeError(f"{command.method} has ended without its parts {gatherer.missing}")
        return outcome, results

    def _deal(self, call: CommandCall, rows: Batch | None, shards: Sequence[Indices]) -> Batch | None:
        """Announces the command and sends each rank its rows; returns rank 0's rows, if there are rows."""
        command = call.command
        self._announce(Order(self.commands.index(command), call.request.SerializeToString()))
        if command.cancellable and self.channel.world_size > 1:
            call.on_cancel(partial(self.failure.cancel, self.channel.num_orders))
        if rows is None or len(shards) == 1:
            return rows
        shares = [rows.take(shard) for shard in shards]
        self.channel.scatter(shares)
        return shares[0]

    def _announce(self, order: Order) -> None:
        """Sends an order to the other ranks; ends the group if the order cannot be sent."""
        try:
            self.channel.announce(order)
        except RuntimeError as error:
            self.failure.end_group(error, Place())

    def _after_failure(self, call: CommandCall, error: Exception, *, has_stepped: bool) -> WireError:
        """Makes the error for a command that failed while it ran; ends the group if the group cannot go on."""
        command = call.command
        if cannot_go_on(error, num_ranks=self.channel.world_size, repairs=command.repairs):
            self.failure.end_group(error, call.place)
        log.error("%s failed in the engine", command.method, exc_info=error)
        if (command.commits and has_stepped) or command.repairs:
            self.worker.mark_dirty(f"{command.method} failed half-way ({describe(error)})")
        answer = engine_error(error, has_stepped=has_stepped, repairs=command.repairs)
        if isinstance(answer, OutOfMemory) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return answer


def _refuse(call: CommandCall, error: BaseException, what: str) -> None:
    """Answers a command call with an error, and logs the error; an unexpected error is logged with its traceback."""
    refusal = wire_error(error)
    is_bug = isinstance(refusal, Internal)
    level = logging.ERROR if is_bug else logging.WARNING
    log.log(level, "%s %s: %s", call.command.method, what, refusal.message, exc_info=error if is_bug else None)
    call.fail(refusal)
