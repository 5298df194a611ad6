"""What every rank but rank 0 does: it takes part in the commands that rank 0 announces (dispatcher.py)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext, suppress
from typing import Any

from services.shell.activity import Activity
from services.shell.collectives import ControlChannel, Order, OrderKind
from services.shell.commands import Command, CommandCancelled, Outcome, step_of
from services.shell.failure import FailureWatch
from services.shell.lifecycle import DURABLE_TIMEOUT_S, attachment_of
from services.shell.logs import working_on
from services.shell.parts import PartSender
from services.shell.reports import FollowerReport
from splitppo import failpoints
from splitppo.batch import Batch

log = logging.getLogger(__name__)


class Follower:
    """Every other rank: does what rank 0 announces."""

    def __init__(
        self,
        commands: Sequence[Command],
        channel: ControlChannel,
        failure: FailureWatch,
        *,
        parts_channel: ControlChannel,
        activity: Activity,
    ) -> None:
        self._commands = commands
        self._channel = channel
        self._parts_channel = parts_channel
        self._failure = failure
        self._durable: list[Future[str]] = []
        self._activity = activity

    def serve(self) -> None:
        """Returns when rank 0 announces the end. Ends the process if this or another rank fails."""
        try:
            while (order := self._channel.hear()).kind is not OrderKind.LEAVE:
                if order.kind is OrderKind.COMMAND:
                    self._take_part(order)
        except Exception as error:  # noqa: BLE001 - the edge: the others must not wait for this rank
            self._failure.end_group(error, self._activity.now().place)
        self._failure.stop()
        wait(self._durable, DURABLE_TIMEOUT_S)

    def _take_part(self, order: Order) -> None:
        command = self._commands[order.command]
        request = command.request_type.FromString(order.request)
        step = step_of(request)
        with self._activity.command(command.place_of(request)):
            share: Any = self._channel.receive(0) if order.has_rows else attachment_of(command, order.attachment)
            with working_on(request), failpoints.at_step(step):
                outcome = self._run(command, request, share)
            if outcome is None:
                self._channel.send_cancelled(0)
            else:
                self._channel.send(outcome.columns, 0)
                if command.commits:
                    failpoints.hit(f"{command.point}.committed", step)
        if outcome is not None and outcome.durable is not None:
            outcome.durable.add_done_callback(_log_if_failed)
            self._durable = [*(future for future in self._durable if not future.done()), outcome.durable]

    def _run(self, command: Command, request: Any, share: Any) -> Outcome | None:
        """The command's outcome; None if it was given up."""
        order = self._channel.sequence
        sender = PartSender(self._parts_channel) if isinstance(share, Batch) and "groups" in share else None
        report = FollowerReport(command, self._activity, sender, lambda: self._failure.is_cancelled(order))
        outcome: Outcome | None = None
        with self._failure.cancellable(order) if command.cancellable else nullcontext(), suppress(CommandCancelled):
            failpoints.hit(f"{command.point}.begin")
            outcome = command.run(request, share, report)
        if sender is not None:
            sender.end()
        return outcome


def _log_if_failed(durable: Future[str]) -> None:
    if error := durable.exception():
        log.error("this rank's part could not be made durable", exc_info=error)
