"""Computes what the steps of a run spent their time on and waited for, by spans; has labels and colours of spans.

Report and viewer draw what stands here, so that they compute no number in two ways.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from splitppo.run_folder.spans import Span, busy_s

# The label of spans by name in the timeline, their colour, and True if text on this colour is white.
PHASES = {
    "gen": ("generate", "#4c78a8", True),
    "update_weights": ("sync", "#b5cf6b", False),
    "old_log_prob": ("old log-probs", "#72b7b2", False),
    "ref": ("reference", "#9ecae9", False),
    "teacher": ("teacher", "#59a14f", True),
    "values": ("values", "#f2cf5b", False),
    "reward_model": ("reward model", "#d67195", True),
    "score": ("reward", "#b279a2", True),
    "environment": ("environments", "#8cd17d", False),
    "adv": ("advantages", "#bab0ac", False),
    "update_actor": ("update", "#f58518", False),
    "publish": ("publish", "#e45756", True),
    "sync": ("sync", "#b5cf6b", False),
    "probe": ("probe", "#79706e", True),
    "update_critic": ("update", "#f58518", False),
    "testing": ("validation", "#d4a6c8", False),
    "save_checkpoint": ("checkpoint", "#9d755d", True),
    "load_checkpoint": ("restore", "#54a24b", True),
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
        updated_s = {span.step: span.finished_s for span in spans if span.name == "update_actor"}
        ahead = {
            span.step
            for span in spans
            if span.name == "gen" and span.started_s < updated_s.get(span.step - 1, -math.inf)
        }
        made = defaultdict(list)
        for span in spans:
            if span.name != "load_checkpoint":
                made[span.step - (span.step in ahead and span.name in _SAMPLING)].append(span)
        self.made: Mapping[int, Sequence[Span]] = dict(made)

    def to_show(self) -> int | None:
        """Chooses a typical step: between two others, without validation or checkpoint, near the median duration.

        None without steps; of steps that all have one of these, any is taken.
        """
        lengths = {
            step: max(call.finished_s for call in calls) - min(call.started_s for call in calls)
            for step, made in sorted(self.made.items())
            if (calls := [span for span in made if span.is_call])
        }
        inner = [step for step in lengths if step > 1 and {step - 1, step + 1} <= lengths.keys()] or list(lengths)
        inner = [step for step in inner if _BESIDE.isdisjoint(span.name for span in self.made[step])] or inner
        if not inner:
            return None
        median = statistics.median(lengths[step] for step in inner)
        return min(inner, key=lambda step: abs(lengths[step] - median))

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
        start, _, at = self.times(step)
        during = [span for span in self.spans if span.started_s < at and span.finished_s > start]
        during = [span for span in during if span.name not in ("load_checkpoint", "update_weights")]
        path = [Span("", WAITING, step, at, at)]  # the start of the next step, without length
        while at > start:
            last = path[-1]
            ended = [span for span in during if span.started_s < at and span.finished_s <= at]
            before = max((span.finished_s for span in ended), default=start)
            around = [span for span in during if span.started_s < at < span.finished_s]
            gens = [span for span in around if span.name == "gen" and span.step == last.step and last.pool]
            needed = [span for span in around if span.name in _EXPERIENCE and span.step == step]
            if gens:
                piece = min(gens, key=lambda span: span.started_s)
                path[-1] = replace(last, started_s=min(piece.finished_s, last.finished_s))
            elif before >= at - _JUST_S:
                near = [span for span in ended if span.finished_s >= at - _JUST_S]
                piece = max(near, key=lambda span: (span.step >= step, -span.started_s))
                if piece.step < step:
                    ends = [span.finished_s for span in during if span.step >= step]
                    done = [end for end in ends if end < min(at, piece.finished_s)]
                    piece = replace(piece, started_s=max(piece.started_s, start, *done))
            else:
                piece = min(needed, key=lambda span: span.started_s) if needed else Span("", WAITING, step, before, at)
            at = max(start, piece.started_s)
            path.append(replace(piece, started_s=at, finished_s=path[-1].started_s))
        return [piece for piece in path[::-1] if piece.duration_s > 0]
