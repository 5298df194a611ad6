"""What a role says while a command runs, on rank 0 and on the others; see `services.shell.commands.Report`."""

from __future__ import annotations

from collections.abc import Callable

from services.shell.activity import Activity
from services.shell.commands import Command
from services.shell.mailbox import Call
from services.shell.parts import PartGatherer, PartSender
from splitppo import failpoints
from splitppo.batch import Batch


class LeaderReport:
    """Rank 0: progress goes to the callers, parts are gathered with those of the other ranks.

    Args:
        call: what is worked on.
        gatherer: None where nothing is streamed.
        activity: of this rank.
    """

    def __init__(self, call: Call, gatherer: PartGatherer | None, activity: Activity) -> None:
        self._call = call
        self._activity = activity
        self._gatherer = gatherer
        self._point = call.command.point

    def __call__(self, done: int, total: int, phase: str) -> None:
        self._activity.progress(done, total, phase)
        self._call.report(done, total, phase)
        failpoints.hit(self._point)

    def part_ready(self, part: int, columns: Batch, *, policy_version: int) -> None:
        if self._gatherer is None:
            raise RuntimeError(f"part {part} was reported, but the command is not streamed")
        self._gatherer.add(0, part, columns, policy_version)
        failpoints.hit(f"{self._point}.part")

    @property
    def is_cancelled(self) -> bool:
        return bool(self._call.cancelled_because)


class FollowerReport:
    """Every other rank: parts are sent to rank 0, progress is only noted, for the case that this rank fails.

    Args:
        command: what is worked on.
        activity: of this rank.
        sender: None where nothing is streamed.
        is_cancelled: whether rank 0 has given the command up.
    """

    def __init__(
        self,
        command: Command,
        activity: Activity,
        sender: PartSender | None,
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._point = command.point
        self._activity = activity
        self._sender = sender
        self._is_cancelled = is_cancelled

    def __call__(self, done: int, total: int, phase: str) -> None:
        self._activity.progress(done, total, phase)
        failpoints.hit(self._point)

    def part_ready(self, part: int, columns: Batch, *, policy_version: int) -> None:
        if self._sender is None:
            raise RuntimeError(f"part {part} was reported, but the command is not streamed")
        self._sender.send(part, columns, policy_version)
        failpoints.hit(f"{self._point}.part")

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled()
