"""Computes what the steps of a run spent their time on and waited for, by spans; has labels and colours of spans.

Report and viewer draw what stands here, so that they compute no number in two ways.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from splitppo.run_folder.spans import Span, busy_s


class Phase(NamedTuple):
    """The label of spans in the timeline, their colour, and True if text on this colour is white."""

    label: str
    colour: str
    is_dark: bool


# By the name of a span.
PHASES = {
    "gen": Phase("generate", "#4c78a8", is_dark=True),
    "update_weights": Phase("sync", "#b5cf6b", is_dark=False),
    "old_log_prob": Phase("old log-probs", "#72b7b2", is_dark=False),
    "ref": Phase("reference", "#9ecae9", is_dark=False),
    "teacher": Phase("teacher", "#59a14f", is_dark=True),
    "values": Phase("values", "#f2cf5b", is_dark=False),
    "reward_model": Phase("reward model", "#d67195", is_dark=True),
    "score": Phase("reward", "#b279a2", is_dark=True),
    "environment": Phase("environments", "#8cd17d", is_dark=False),
    "adv": Phase("advantages", "#bab0ac", is_dark=False),
    "update_actor": Phase("update", "#f58518", is_dark=False),
    "publish": Phase("publish", "#e45756", is_dark=True),
    "sync": Phase("sync", "#b5cf6b", is_dark=False),
    "probe": Phase("probe", "#79706e", is_dark=True),
    "update_critic": Phase("update", "#f58518", is_dark=False),
    "testing": Phase("validation", "#d4a6c8", is_dark=False),
    "save_checkpoint": Phase("checkpoint", "#9d755d", is_dark=True),
    "load_checkpoint": Phase("restore", "#54a24b", is_dark=True),
}
# The name of a piece of the critical path that waits for no call: messages, or the controller's own work.
WAITING = "waiting"
# The share of a step's length that is shown before and after it; a longer pause after a step does not belong to it.
MARGIN = 0.08
# The spans of a step's responses.
_SAMPLING = frozenset({"gen", "update_weights", "environment", "score", "reward_model"})
# Work that not every step has.
_BESIDE = frozenset({"testing", "save_checkpoint"})
# What all advantages of a step need.
_EXPERIENCE = _SAMPLING | {"old_log_prob", "ref", "teacher", "values"}
# A call that ended at most this long before another one began, "ended just then".
_JUST_S = 0.005


class Steps:
    """The spans of a run by the step in whose time they were made.

    Attributes:
        spans: all of them.
        made: by step, without restores, which may come much later. Responses that were sampled before the actor's
            update of the step before (rollout.staleness 1) belong to that step.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        sampled_ahead = _steps_sampled_ahead(spans)
        made = defaultdict(list)
        for span in spans:
            if span.name == "load_checkpoint":
                continue
            is_ahead = span.step in sampled_ahead and span.name in _SAMPLING
            made[span.step - 1 if is_ahead else span.step].append(span)
        self.made: Mapping[int, Sequence[Span]] = dict(made)

    def to_show(self) -> int | None:
        """Chooses a typical step: between two others, without validation or checkpoint, near the median duration.

        None without steps; of steps that all have one of these, any is taken.
        """
        lengths = self._lengths()
        if not lengths:
            return None
        inner = [step for step in lengths if step > 1 and {step - 1, step + 1} <= lengths.keys()] or list(lengths)
        plain = [step for step in inner if _BESIDE.isdisjoint(span.name for span in self.made[step])] or inner
        median = statistics.median(lengths[step] for step in plain)
        return min(plain, key=lambda step: abs(lengths[step] - median))

    def _lengths(self) -> dict[int, float]:
        """Returns the seconds from the first call of a step to the end of its last one, by step."""
        lengths = {}
        for step, made in sorted(self.made.items()):
            calls = [span for span in made if span.is_call]
            if calls:
                lengths[step] = max(call.finished_s for call in calls) - min(call.started_s for call in calls)
        return lengths

    def times(self, step: int) -> tuple[float, float, float]:
        """Returns the start of a step, the end of its last work, and the start of the next step, in unix seconds.

        If the run paused or ended after the step, the third time is the end of the last work.
        """
        made = self.made[step]
        start = min(span.started_s for span in made)
        end = max(span.finished_s for span in made)
        next_start = min((span.started_s for span in self.made.get(step + 1, ()) if span.is_call), default=end)
        return start, end, next_start if next_start <= end + MARGIN * (end - start) else end

    def busy(self, step: int) -> dict[str, float]:
        """Returns for how many seconds of a step's own time each pool that worked then was busy."""
        start, _, next_start = self.times(step)
        spans = defaultdict(list)
        for span in self.spans:
            if span.started_s < next_start and span.finished_s > start:
                spans[span.pool].append(span)
        return {pool: busy_s(found, start, next_start) for pool, found in spans.items()}

    def critical_path(self, step: int) -> list[Span]:
        """Says what the time from the start of a step to that of the next one was spent waiting for.

        Pieces of spans follow one another without a gap, found backwards. Whatever begins at a time t was waiting for
        the call that ended just then: of several, for the longest, and first for one of the step. With none, a call
        counts that goes on at t, if the advantages of the step need it; with none, the time since the last call ended
        is a piece of the name `WAITING` and of no pool. Generation hands on its first responses before its
        end: what begins under it waits for it, and itself counts from its end on. Work of an earlier step, such as the
        critic's update that runs beside the next generation, counts only from the time at which all else that the step
        had begun was done: before that, nobody waited for it.

        This is read off the clock, not from what calls need of each other. It does not say how much faster the step
        would be without a piece: another call may have ended a moment earlier. A call of less than 5 ms may count for
        the one before it.
        """
        start, _, end = self.times(step)
        during = [span for span in self.spans if span.started_s < end and span.finished_s > start]
        during = [span for span in during if span.name not in ("load_checkpoint", "update_weights")]
        path = [Span("", WAITING, step, end, end)]  # the start of the next step, without length
        at = end
        while at > start:
            piece = _generation_under(during, path[-1], at)
            if piece is None:
                piece = _waited_for(during, step, start, at)
            else:
                path[-1] = replace(path[-1], started_s=min(piece.finished_s, path[-1].finished_s))
            at = max(start, piece.started_s)
            path.append(replace(piece, started_s=at, finished_s=path[-1].started_s))
        return [piece for piece in path[::-1] if piece.duration_s > 0]


def _steps_sampled_ahead(spans: Sequence[Span]) -> set[int]:
    """Returns the steps whose responses were sampled before the actor's update of the step before had ended."""
    updated_s = {span.step: span.finished_s for span in spans if span.name == "update_actor"}
    gens = [span for span in spans if span.name == "gen"]
    return {gen.step for gen in gens if gen.started_s < updated_s.get(gen.step - 1, -math.inf)}


def _generation_under(during: Sequence[Span], later: Span, at: float) -> Span | None:
    """Returns the generation of the same step that goes on at `at`, when the piece `later` of a path began.

    It handed on the responses with which the piece began.
    """
    if not later.pool:
        return None
    gens = [span for span in during if span.name == "gen" and span.step == later.step]
    around = [span for span in gens if span.started_s < at < span.finished_s]
    return min(around, key=lambda span: span.started_s, default=None)


def _waited_for(during: Sequence[Span], step: int, start: float, at: float) -> Span:
    """Returns what a step, which began at `start`, was waiting for just before `at`.

    Of the calls that ended just then the longest counts, and first one of this step or a later one; an earlier step's
    counts only after the rest. With none, it is a call that goes on and makes the step's advantages, else nothing: a
    span named WAITING.
    """
    ended = [span for span in during if span.started_s < at and span.finished_s <= at]
    last_end = max((span.finished_s for span in ended), default=start)
    if last_end >= at - _JUST_S:
        just_ended = [span for span in ended if span.finished_s >= at - _JUST_S]
        longest = max(just_ended, key=lambda span: (span.step >= step, -span.started_s))
        return longest if longest.step >= step else _awaited_part(longest, during, step, start, at)
    around = [span for span in during if span.started_s < at < span.finished_s]
    needed = [span for span in around if span.name in _EXPERIENCE and span.step == step]
    return min(needed, key=lambda span: span.started_s, default=Span("", WAITING, step, last_end, at))


def _awaited_part(earlier: Span, during: Sequence[Span], step: int, start: float, at: float) -> Span:
    """Cuts off of an earlier step's work what was done while this step had work of its own: nobody waited for it."""
    ends = [span.finished_s for span in during if span.step >= step]
    before = [end for end in ends if end < min(at, earlier.finished_s)]
    return replace(earlier, started_s=max(earlier.started_s, start, *before))
