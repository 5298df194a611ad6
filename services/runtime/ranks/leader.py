"""Runs the command loop on the main thread of rank 0: one command after the other, on all ranks together.

    rank 0                                                   ranks 1..N-1 (follower.py)
    take the next call from the command queue
    check who asks, and for which step (preconditions.py)
    select its rows, let the role prepare them
    announce the command            --- order ------------>  receive the order
    run it (run_command.py)         <-- rows, parts, ----->  run it (run_command.py)
                                        messages, columns
    restore the order of the rows
    keep them in the slot, commit (results.py)
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

from services.runtime.command import CommandCancelled, Effect, Outcome
from services.runtime.failures.error_policy import OptimizerStepCounter, cannot_go_on, cannot_save, engine_error
from services.runtime.failures.heartbeat import Activity
from services.runtime.failures.peer_watch import PeerWatch
from services.runtime.ranks.checkpoint_commands import DURABLE_TIMEOUT_S
from services.runtime.ranks.control_channel import LEAVE, NOTHING, ControlChannel, Order
from services.runtime.ranks.exchange import LeaderExchange
from services.runtime.ranks.parts import PartGatherer
from services.runtime.ranks.preconditions import check_identity, prepared_rows
from services.runtime.ranks.results import keep_result
from services.runtime.ranks.run_command import at_work, run_command
from services.runtime.ranks.sharding import Indices, join_shards, shard_rows
from services.runtime.state.command_call import CommandCall
from services.runtime.state.command_messages import CommandMessages
from services.runtime.state.command_queue import CommandQueueClosed
from services.runtime.state.worker import Worker
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
        channel: sends orders and rows to the other ranks, and gets their results.
        side_channel: carries parts and messages while a command runs, on a process group of its own.
        idle_interval_s: seconds between orders NOTHING, so that the other ranks' wait does not time out.
    """

    worker: Worker
    channel: ControlChannel
    side_channel: ControlChannel
    failure: PeerWatch
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
                with at_work(self.activity, call.command, call.request):
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
        """Answers a call once its files are written: with the reply, or with the error, which may end the group.

        `durable` is done, and has the manifest's sha256. A save is also noted in the ledger, so that its repetition
        gets the same reply.
        """
        if error := durable.exception():
            if cannot_save(error, num_ranks=self.channel.world_size):
                self.failure.end_group(error, call.place)
            _refuse(call, error, "could not be made durable")
            return
        reply.manifest_sha256 = durable.result()
        if call.command.effect is Effect.SAVES:
            assert self.worker.ledger is not None, "who saves has a ledger"
            self.worker.ledger.remember_save(call.request_id, call.stored(reply))
        call.resolve(reply)

    def _run(self, call: CommandCall, rows: Batch | None) -> Outcome:
        """Runs the command on all ranks; returns rank 0's outcome with all ranks' columns in the order of `rows`.

        Raises:
            Unavailable: the command was cancelled before every rank had finished it; nothing of it is kept.
            WireError: the command failed.
        """
        shards = [] if rows is None else shard_rows(rows, self.channel.world_size, call.command.rows.shard)
        shares = _shares_of_ranks(rows, shards)
        _open_messages(call, shares)
        gatherer = self._part_gatherer(call, rows)
        steps_before = self.steps.num_steps
        try:
            outcome, results = self._run_on_all_ranks(call, shares, gatherer)
        except CommandCancelled as given_up:
            if gatherer.num_parts:
                self.worker.slots.drop_parts(call.request.slot)
            raise Unavailable(f"the command was cancelled: {call.cancelled_because}") from given_up
        except Exception as error:
            raise self._after_failure(call, error, has_stepped=self.steps.num_steps > steps_before) from error
        return replace(outcome, columns=None if rows is None else join_shards(shards, results))

    def _run_on_all_ranks(
        self, call: CommandCall, shares: Sequence[Batch] | None, gatherer: PartGatherer
    ) -> tuple[Outcome, Sequence[Batch | None]]:
        """Runs the command on all ranks; returns rank 0's outcome, and the result columns of each rank.

        Raises:
            CommandCancelled: the command was cancelled, and a rank has stopped early.
        """
        method = call.command.method

        def lost(error: Exception) -> None:
            self.failure.end_group(error, call.place)

        exchange = LeaderExchange(self.channel, self.side_channel, shares, gatherer, call.messages, lost)
        self._order(call)
        try:
            outcome, results = run_command(
                call.command,
                call.request,
                exchange,
                on_progress=(self.activity.progress, call.report),
                is_cancelled=lambda: bool(call.cancelled_because),
            )
        except CommandCancelled as given_up:
            if call.cancelled_because:
                raise
            raise RuntimeError(f"a rank gave {method} up, but it was not cancelled") from given_up
        if gatherer.missing:
            raise RuntimeError(f"{method} has ended without its parts {gatherer.missing}")
        return outcome, results

    def _part_gatherer(self, call: CommandCall, rows: Batch | None) -> PartGatherer:
        """Makes what puts the parts of a command together in its slot, which has none of them at first."""
        slots = self.worker.slots

        def deliver(part: worker_pb2.PartReady, columns: Batch) -> None:
            # Also after a cancellation: all ranks may have finished before they learn of it.
            slots.add_part(call.request.slot, part.part, columns)
            call.announce(worker_pb2.CommandEvent(part=part))

        num_parts = call.command.num_parts_of(call.request, rows)
        if num_parts:
            slots.drop_parts(call.request.slot)  # of an attempt that failed
        return PartGatherer(num_parts, self.channel.world_size, deliver)

    def _order(self, call: CommandCall) -> None:
        """Tells the other ranks to run a command, and if it can be cancelled, later perhaps that it is."""
        self._announce(Order(self.worker.commands.index(call.command), call.request.SerializeToString()))
        if call.command.effect.can_be_cancelled and self.channel.world_size > 1:
            call.on_cancel(partial(self.failure.cancel, self.channel.num_orders))

    def _announce(self, order: Order) -> None:
        """Sends an order to the other ranks; ends the group if the order cannot be sent."""
        try:
            self.channel.announce(order)
        except RuntimeError as error:
            self.failure.end_group(error, Place())

    def _after_failure(self, call: CommandCall, error: Exception, *, has_stepped: bool) -> WireError:
        """Makes the error for a command that failed while it ran; ends the group if the group cannot go on."""
        command = call.command
        loads = command.effect is Effect.LOADS
        if cannot_go_on(error, num_ranks=self.channel.world_size, loads=loads):
            self.failure.end_group(error, call.place)
        log.error("%s failed in the engine", command.method, exc_info=error)
        if loads or (command.effect is Effect.TRAINS and has_stepped):
            self.worker.mark_dirty(f"{command.method} failed half-way ({describe(error)})")
        answer = engine_error(error, has_stepped=has_stepped, loads=loads)
        if isinstance(answer, OutOfMemory) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return answer


def _shares_of_ranks(rows: Batch | None, shards: Sequence[Indices]) -> Sequence[Batch] | None:
    """Returns the rows of each rank; None if the command works on none."""
    if rows is None:
        return None
    return [rows] if len(shards) == 1 else [rows.take(shard) for shard in shards]


def _open_messages(call: CommandCall, shares: Sequence[Batch] | None) -> None:
    """Lets a call take messages from now on, if it exchanges any."""
    messages = call.command.messages
    if messages is not None and messages.are_exchanged(call.request):
        assert shares is not None, "messages are about rows"
        call.messages = CommandMessages(messages.open(call.request, shares), len(shares), call.announce)


def _refuse(call: CommandCall, error: BaseException, what: str) -> None:
    """Answers a command call with an error, and logs the error; an unexpected error is logged with its traceback."""
    refusal = wire_error(error)
    is_bug = isinstance(refusal, Internal)
    level = logging.ERROR if is_bug else logging.WARNING
    log.log(level, "%s %s: %s", call.command.method, what, refusal.message, exc_info=error if is_bug else None)
    call.fail(refusal)
