"""Converts sampled responses into batch rows, and reports them as parts while the command Generate runs."""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import numpy as np

from services.rollout.protocol import Response
from services.runtime.command import CommandProgress
from splitppo.balance import part_ends
from splitppo.batch import Batch
from splitppo.images.columns import IMAGE_COLUMNS


class StreamedParts:
    """Reports a rank's sampled responses as parts in the order in which they end; nothing if there is one part.

    The order is that of decoding steps, and by index within a step. So parts depend on the tokens alone, never on
    timing. The number of responses in each part is fixed before sampling begins (`part_ends`). `rows` are those of the
    rank that are sampled. `have_turns`: see `response_rows`.
    """

    def __init__(
        self, rows: Batch, num_parts: int, report: CommandProgress, policy_version: int, *, have_turns: bool = False
    ) -> None:
        """Reports at once the parts that have no rows on this rank; with a single part nothing is reported."""
        self._report = report
        self._policy_version = policy_version
        self._have_turns = have_turns
        self._rows_of_prompts = rows
        self._places = rows["places"].values if num_parts > 1 else None
        self._ends = [] if self._places is None else part_ends(len(self._places), num_parts)
        self._num_reported = 0
        self._ended: list[Response] = []
        self.add(())  # parts that have no rows here

    def add(self, ended: Iterable[Response]) -> None:
        """Adds the responses that ended in a decoding step, and reports the parts that are now complete."""
        self._ended += sorted(ended, key=attrgetter("index"))
        while self._num_reported < len(self._ends) and len(self._ended) >= self._ends[self._num_reported]:
            begin = self._ends[self._num_reported - 1] if self._num_reported else 0
            rows = self._rows(self._ended[begin : self._ends[self._num_reported]])
            self._num_reported += 1
            self._report.part_ready(self._num_reported, rows, policy_version=self._policy_version)

    def _rows(self, responses: Iterable[Response]) -> Batch:
        assert self._places is not None
        indices = sorted(response.index for response in responses)
        places = [[self._places[index]] for index in indices]
        columns = response_rows(responses, self._rows_of_prompts, have_turns=self._have_turns)
        return columns.merge(Batch.from_rows(places=places))


def response_rows(
    responses: Iterable[Response],
    rows: Batch | None = None,
    *,
    have_turns: bool = False,
    may_go_on: bool = False,
) -> Batch:
    """Converts responses to a Batch, ordered by index: prompts, seeds, responses, rollout_log_probs.

    `rows` are those of the rank that were sampled: where their prompts have images, the Batch has them, too.
    `have_turns`: the responses are conversations, and the Batch has the columns response_mask and segments, too.
    `may_go_on`: some may be cut, and the Batch has the column unfinished.
    """
    ordered = sorted(responses, key=attrgetter("index"))
    further: dict[str, Any] = {}
    if have_turns:
        further["response_mask"] = [response.mask for response in ordered]
        further["segments"] = [response.segments for response in ordered]
    if may_go_on:
        further["unfinished"] = [[response.is_unfinished] for response in ordered]
    columns = Batch.from_rows(
        prompts=[response.prompt for response in ordered],
        seeds=[[response.seed] for response in ordered],
        responses=[response.tokens for response in ordered],
        rollout_log_probs=[response.log_probs for response in ordered],
        **further,
    )
    if rows is None or "images" not in rows:
        return columns
    rows_of_prompts = np.array([response.row for response in ordered], np.int64)
    return columns.merge(rows.select(IMAGE_COLUMNS).take(rows_of_prompts))
