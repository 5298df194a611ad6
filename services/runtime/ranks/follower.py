"""Runs the command loop of every rank but rank 0: takes part in the commands that rank 0 orders (leader.py)."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from services.runtime.failures.heartbeat import Activity
from services.runtime.failures.peer_watch import PeerWatch
from services.runtime.logs import working_on
from services.runtime.ranks.checkpoint_commands import DURABLE_TIMEOUT_S
from services.runtime.ranks.control_channel import LEAVE, NOTHING, ControlChannel, Order
from services.runtime.ranks.exchange import receiving_replies
from services.runtime.ranks.parts import num_parts_of, sending
from services.runtime.role import Command, CommandCancelled, CommandProgress, Outcome, step_of
from splitppo import failpoints

log = logging.getLogger(__name__)


@dataclass
class Follower:
    """The command loop of a rank other than rank 0; its attributes are those of `Leader`."""

    commands: Sequence[Command]
    channel: ControlChannel
    failure: PeerWatch
    parts_channel: ControlChannel
    activity: Activity
    durable: list[Future[str]] = field(default_factory=list)

    def serve(self) -> None:
        """Takes part in commands until rank 0 orders the ranks to leave. Ends the process if a rank fails."""
        try:
            while (order := self.channel.next_order()).command != LEAVE:
                if order.command != NOTHING:
                    self._take_part(order)
        except Exception as error:  # noqa: BLE001 - the others must not wait for this rank
            self.failure.end_group(error, self.activity.now().place)
        self.failure.stop()
        wait(self.durable, DURABLE_TIMEOUT_S)

    def _take_part(self, order: Order) -> None:
        command = self.commands[order.command]
        request: Any = command.request_type.FromString(order.request)
        step = step_of(request)
        with self.activity.command(command.place_of(request)):
            share = self.channel.receive(0) if command.works_on_slot else None
            with working_on(step, request.header.request_id), failpoints.at_step(step):
                outcome = self._run(command, request, share)
            if outcome is None:
                self.channel.send_cancelled(0)
                return
            self.channel.send(outcome.columns, 0)
            if command.commits:
                failpoints.hit(f"{command.point}.committed", step)
        if outcome.durable is not None:
            outcome.durable.add_done_callback(_log_if_failed)
            self.durable = [*(future for future in self.durable if not future.done()), outcome.durable]

    def _run(self, command: Command, request: Any, share: Any) -> Outcome | None:
        """Runs a command on this rank's rows and returns the outcome; None if the command was cancelled meanwhile."""
        channel = self.parts_channel
        takes_replies = command.reply_limits(request) is not None
        num_parts = num_parts_of(command, request, share)
        is_cancelled = partial(self.failure.is_cancelled, self.channel.num_orders)
        with ExitStack() as stack:
            replies = stack.enter_context(receiving_replies(channel, self._lost)) if takes_replies else None
            sender = stack.enter_context(sending(channel, num_parts, takes_replies=takes_replies))
            stack.enter_context(suppress(CommandCancelled))
            tell = (self.activity.progress,)
            send_part = sender.send_part
            send_turns = sender.send_turns
            progress = CommandProgress(command.point, tell, send_part, is_cancelled, send_turns, replies)
            failpoints.hit(f"{command.point}.begin")
            return command.run(request, share, progress)
        return None

    def _lost(self, error: Exception) -> None:
        self.failure.end_group(error, self.activity.now().place)


def _log_if_failed(durable: Future[str]) -> None:
    if error := durable.exception():
        log.error("this rank's part could not be made durable", exc_info=error)
