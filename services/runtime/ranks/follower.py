"""Runs the command loop of every rank but rank 0: takes part in the commands that rank 0 orders (leader.py)."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from services.runtime.command import Command, CommandCancelled, Effect
from services.runtime.failures.heartbeat import Activity
from services.runtime.failures.peer_watch import PeerWatch
from services.runtime.ranks.checkpoint_commands import DURABLE_TIMEOUT_S
from services.runtime.ranks.control_channel import LEAVE, NOTHING, ControlChannel, Order
from services.runtime.ranks.exchange import FollowerExchange
from services.runtime.ranks.run_command import at_work, run_command
from splitppo import failpoints

log = logging.getLogger(__name__)


@dataclass
class Follower:
    """The command loop of a rank other than rank 0; its attributes are those of `Leader`.

    `commands` is the table of commands, the same on every rank; `durable` are the saves that are still being written.
    """

    commands: Sequence[Command]
    channel: ControlChannel
    side_channel: ControlChannel
    failure: PeerWatch
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
        """Runs the command of an order together with the other ranks, which may give it up together."""
        command = self.commands[order.command]
        request: Any = command.request_type.FromString(order.request)
        exchange = FollowerExchange(self.channel, self.side_channel, command, request, self._lost)
        with at_work(self.activity, command, request):
            try:
                outcome, _ = run_command(
                    command,
                    request,
                    exchange,
                    on_progress=(self.activity.progress,),
                    is_cancelled=partial(self.failure.is_cancelled, self.channel.num_orders),
                )
            except CommandCancelled:
                return
            if command.effect is Effect.TRAINS:
                failpoints.hit(f"{command.point}.committed")
        if outcome.durable is not None:
            outcome.durable.add_done_callback(_log_if_failed)
            self.durable = [*(future for future in self.durable if not future.done()), outcome.durable]

    def _lost(self, error: Exception) -> None:
        self.failure.end_group(error, self.activity.now().place)


def _log_if_failed(durable: Future[str]) -> None:
    if error := durable.exception():
        log.error("this rank's part could not be made durable", exc_info=error)
