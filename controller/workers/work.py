"""Collects what is done for a step, or for a validation, while it is done."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from controller.workers.command import CommandReply
from splitppo.clock import unix_s
from splitppo.run_folder.spans import MAX_ENVIRONMENT_SPANS, Parts, Span, joined


@dataclass
class Work:
    """The work that was done for a step: who worked when, how long its phases took, and what the services reported.

    Attributes:
        metrics: the metrics that the services reported.
        timings_s: seconds per phase, measured by the controller, or by an engine for its own work.
        spans: the work of all pools, in unix seconds of the controller's clock.
    """

    step: int
    metrics: dict[str, float] = field(default_factory=dict, kw_only=True)
    timings_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float), kw_only=True)
    spans: list[Span] = field(default_factory=list, kw_only=True)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measures the wall time of a `with` block, and adds it to the timing `name`, in seconds."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.timings_s[name] += time.perf_counter() - started_s

    @contextmanager
    def span(self, pool: str, name: str) -> Iterator[None]:
        """Records the time of a `with` block in the timeline, as a span of a pool (controller or scoring)."""
        started_s = unix_s()
        yield
        self.spans.append(Span(pool, name, self.step, started_s, unix_s()))

    def add_environments(self, spans: Sequence[Span]) -> None:
        """Adds the times in which environments were at work."""
        self.spans += joined(spans, MAX_ENVIRONMENT_SPANS)
        self.timings_s["environment"] += sum(span.duration_s for span in spans)

    def add_work_of(self, spans: Sequence[Span], timings_s: Mapping[str, float]) -> None:
        """Adds work for another step, or of a validation, that is done during this step."""
        self.spans += spans
        for name, seconds in timings_s.items():
            self.timings_s[name] += seconds

    def add_reply(self, pool: str, name: str, reply: CommandReply, *, parts: Parts = ()) -> None:
        """Adds an engine's work on a command: its span, its metrics, and the times that it measured."""
        self.spans += reply.spans(pool, name, self.step, parts)
        for metric, value in reply.result.metrics.items():
            if not metric.startswith("timing_s/"):
                self.metrics[metric] = value
        for timing, seconds in reply.timings_s.items():
            self.timings_s[timing] += seconds
