"""Runs a command on one rank; all ranks of the group call this at the same time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from services.runtime.command import Command, CommandCancelled, CommandProgress, Outcome, step_of
from services.runtime.failures.heartbeat import Activity
from services.runtime.logs import working_on
from services.runtime.ranks.exchange import Exchange
from splitppo import failpoints
from splitppo.batch import Batch


def run_command(
    command: Command,
    request: Any,
    exchange: Exchange,
    *,
    on_progress: Sequence[Callable[[int, int, str], None]],
    is_cancelled: Callable[[], bool],
) -> tuple[Outcome, Sequence[Batch | None]]:
    """Runs a command on this rank: takes its rows, calls the role's function, hands in the result.

    Returns:
        This rank's outcome; and on rank 0 the result columns of each rank, elsewhere nothing.

    Raises:
        CommandCancelled: this rank has stopped the cancelled command or, on rank 0, any rank has. The group goes on.
        Exception: any other error of the role's function. Other ranks now wait for this one.
    """
    rows = exchange.take_rows()
    progress = CommandProgress(
        command.point, on_progress, exchange.add_part, is_cancelled, exchange.send, exchange.inbox
    )
    outcome = None
    with exchange.open(), suppress(CommandCancelled):
        failpoints.hit(f"{command.point}.begin")
        outcome = command.run(request, rows, progress)
        outcome = replace(outcome, metrics={name: float(value) for name, value in outcome.metrics.items()})
    results = exchange.hand_in(outcome)
    if outcome is None:
        raise CommandCancelled
    return outcome, results


@contextmanager
def at_work(activity: Activity, command: Command, request: Any) -> Iterator[None]:
    """Lets the heartbeat, the log lines and the failpoints of this rank name the command in the `with` block."""
    step = step_of(request)
    with (
        activity.command(command.place_of(request)),
        working_on(step, request.header.request_id),
        failpoints.at_step(step),
    ):
        yield
