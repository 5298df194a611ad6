"""A span: one piece of work of a pool, as it stands in the timeline of a run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

# Validations, checkpoints and restores: work beside the calls of a step.
_BESIDE_STEPS = frozenset({"testing", "save_checkpoint", "load_checkpoint"})


Parts = Sequence[Sequence[int]]


@dataclass(frozen=True, order=True)
class Span:
    """One piece of work of a pool (actor, critic, controller or reward) for a step; times are unix seconds.

    Of a service it is what occupied its engine: of a checkpoint the snapshot, not the writing in the background. A
    validation and a checkpoint belong to the step whose weights they are about, a restore to the step restored.
    `parts` are those of a streamed generation: the rows of the step that each of them held.
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
        """True if it is a call of the step itself, and not a validation, checkpoint or restore beside it."""
        return self.name not in _BESIDE_STEPS


def busy_s(spans: Iterable[Span], started_s: float, finished_s: float) -> float:
    """Seconds of the interval in which at least one span runs."""
    busy, reached = 0.0, started_s
    for span in sorted(spans, key=lambda span: span.started_s):
        start, end = max(span.started_s, reached), min(span.finished_s, finished_s)
        if end > start:
            busy += end - start
            reached = end
    return busy
