"""The interface that every tracker implements, and the description of a run that trackers show."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

_MAX_REASON = 300  # characters


@dataclass(frozen=True)
class Run:
    """A training run as its trackers show it.

    Attributes:
        id: 16 hexadecimal digits, the same over all starts of the run.
        name, project: the values of `run.name` and `tracking.project`.
        folder: the run folder, absolute.
        config: the resolved configuration.
        sync: the command that sends what trackers lack; they may run in another Python than it.
    """

    id: str
    name: str
    project: str
    folder: Path
    config: Mapping[str, Any]
    sync: str = ""

    def line(self) -> str:
        """Converts the run to one line of JSON, which the tracker process reads."""
        return json.dumps(asdict(self), default=str) + "\n"

    @classmethod
    def parse(cls, line: str) -> Self:
        """Parses the line of JSON that `line` has made, and returns the run."""
        fields = json.loads(line)
        return cls(**fields | {"folder": Path(fields["folder"])})


def reason_of(error: Exception) -> str:
    """Shortens the message of a tracker's error to one line: as many whole sentences as fit into 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) <= _MAX_REASON:
        return text
    sentences, end, _ = text[:_MAX_REASON].rpartition(". ")
    return sentences if end else textwrap.shorten(text, _MAX_REASON, placeholder=" ...")


class Tracker(Protocol):
    """The connection of a run to one tracker, e.g. W&B. A client's error ends the connection; the feed makes another.

    Attributes:
        last_step: the tracker's last step when the connection was made, -1 if none; None if the tracker does not know.
    """

    last_step: int | None = None

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sequence[Any]]) -> None:
        """Sends a step to the tracker. All metrics are finite; `samples` has rows of SAMPLE_COLUMNS, often none."""

    def log_report(self, step: int, report: Path) -> None:
        """Sends the tracker the file report.png, which shows the run up to this step."""

    def rewind(self) -> bool:
        """Removes all steps from the tracker, because the run repeats some; returns False if it cannot remove steps."""
        return False

    def close(self, *, has_failed: bool) -> None:
        """Delivers the data that the tracker's client still has, and ends the connection."""
