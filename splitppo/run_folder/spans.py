"""Defines `Span`, a piece of work of a pool in the timeline of a run, and computes how long spans keep a pool busy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

# Validations, checkpoints and restores are work beside the calls of a step; a weight sync is a part of another call.
_NO_CALLS = frozenset({"testing", "save_checkpoint", "load_checkpoint", "update_weights"})
MAX_ENVIRONMENT_SPANS = 200  # of one generation; more are joined over the shortest pauses

Parts = Sequence[Sequence[int]]


@dataclass(frozen=True, order=True)
class Span:
    """One piece of work of a pool (actor, critic, controller, scoring or reward) for a step; times are unix seconds.

    The span of a service is the work of its engine. For a checkpoint this is the snapshot, without the writing in the
    background. A validation and a checkpoint belong to the step whose weights they use, a restore to the restored step.
    `parts` has the rows of the step in each part of a streamed generation.
    """

    pool: str
    name: str
    step: int
    started_s: float
    finished_s: float
    parts: Parts = field(default=(), compare=False)

    @property
    def duration_s(self) -> float:
        return self.finished_s - self.started_s

    @property
    def is_call(self) -> bool:
        """True if the span is a call of the step itself, and not a part of one, a validation, checkpoint or restore."""
        return self.name not in _NO_CALLS


def joined(spans: Sequence[Span], most: int) -> list[Span]:
    """Joins spans, which follow one another, over the shortest pauses, so that at most `most` are left.

    The `most` - 1 longest pauses stay: at each of them a span begins.
    """
    pauses = {place: spans[place].started_s - spans[place - 1].finished_s for place in range(1, len(spans))}
    longest = sorted(pauses, key=lambda place: -pauses[place])[: most - 1]
    starts = [0, *sorted(longest)][: len(spans)]
    ends = zip(starts, [*starts[1:], len(spans)], strict=False)
    return [replace(spans[start], finished_s=spans[end - 1].finished_s) for start, end in ends]


def busy_s(spans: Iterable[Span], started_s: float, finished_s: float) -> float:
    """Returns how many seconds of the interval from `started_s` to `finished_s` are covered by at least one span.

    Where spans overlap, a second counts once: `reached` is how far it has been counted.
    """
    busy = 0.0
    reached = started_s
    for span in sorted(spans, key=lambda span: span.started_s):
        start = max(span.started_s, reached)
        end = min(span.finished_s, finished_s)
        if end > start:
            busy += end - start
            reached = end
    return busy
