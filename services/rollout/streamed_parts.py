"""Responses as rows, and as parts of the command that samples them."""

from collections.abc import Iterable
from math import ceil
from operator import attrgetter

from services.rollout.protocol import Response
from services.runtime.role import CommandProgress
from splitppo.batch import COLUMN_DTYPES, Batch, Column
from splitppo.config.streaming import LARGEST_PART


class StreamedParts:
    """Reports a rank's responses as parts, if their rows have places: in the order in which they end.

    That order is counted in decoding steps, and by index among those that end in the same one, so parts are a function
    of the tokens, never of the clock. How many responses are in a part is known before (`part_ends`).
    """

    def __init__(self, rows: Batch, num_parts: int, report: CommandProgress, policy_version: int) -> None:
        self._report, self._policy_version = report, policy_version
        self._places = rows["places"].values if "places" in rows else None
        self._ends = [] if self._places is None else part_ends(len(self._places), num_parts)
        self._num_reported = 0
        self._ended: list[Response] = []
        self.add(())  # parts that have no rows here

    def add(self, ended: Iterable[Response]) -> None:
        """The responses that have ended in a decoding step."""
        self._ended += sorted(ended, key=attrgetter("index"))
        for part, end in enumerate(self._ends[self._num_reported :], start=self._num_reported + 1):
            if len(self._ended) < end:
                return
            begin = self._ends[part - 2] if part > 1 else 0
            self._report.part_ready(part, self._rows(self._ended[begin:end]), policy_version=self._policy_version)
            self._num_reported = part

    def _rows(self, responses: Iterable[Response]) -> Batch:
        assert self._places is not None
        ordered = sorted(responses, key=attrgetter("index"))
        places = [[self._places[response.index]] for response in ordered]
        column = Column.from_rows(places, COLUMN_DTYPES["places"])
        return response_rows(ordered).merge(Batch(len(ordered), {"places": column}))


def part_ends(num_responses: int, num_parts: int) -> list[int]:
    """How many responses are in each part and all before it.

    A part takes half of what the parts before have left, but no more than LARGEST_PART equal shares, and leaves one to
    each part behind it as long as there are enough. What comes first should come soon; few responses are long, and what
    comes last hides behind nothing.
    """
    ends, left = [], num_responses
    largest = ceil(LARGEST_PART * num_responses / num_parts)
    for num_behind in reversed(range(num_parts)):
        left -= max(min((left + 1) // 2, largest, left - num_behind), min(left, 1)) if num_behind else left
        ends.append(num_responses - left)
    return ends


def response_rows(responses: Iterable[Response]) -> Batch:
    """A row for each, ordered by index: prompts, responses, rollout_log_probs."""
    ordered = sorted(responses, key=attrgetter("index"))
    return Batch.from_rows(
        prompts=[response.prompt for response in ordered],
        responses=[response.tokens for response in ordered],
        rollout_log_probs=[response.log_probs for response in ordered],
    )
