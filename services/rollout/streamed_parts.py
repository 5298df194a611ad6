"""Responses as rows, and as parts of the command that samples them."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from services.rollout.protocol import Response
from services.runtime.role import CommandProgress
from splitppo.batch import Batch


class StreamedParts:
    """Reports each group of a rank's rows, if they have groups, as a part once all its responses have ended."""

    def __init__(self, rows: Batch, report: CommandProgress, policy_version: int) -> None:
        self._report, self._policy_version = report, policy_version
        groups = np.repeat(rows["groups"].values, rows["seeds"].lengths).tolist() if "groups" in rows else ()
        self._num_responses = Counter(groups)  # of each group; none where nothing is streamed
        self._ended: dict[int, list[Response]] = defaultdict(list)

    def add(self, response: Response) -> None:
        """A response that has ended."""
        group = self._ended[response.group]
        group.append(response)
        if len(group) == self._num_responses[response.group]:
            self._report.part_ready(response.group + 1, response_rows(group), policy_version=self._policy_version)


def response_rows(responses: Iterable[Response]) -> Batch:
    """A row for each, ordered by index: prompts, responses, rollout_log_probs."""
    ordered = sorted(responses, key=attrgetter("index"))
    return Batch.from_rows(
        prompts=[response.prompt for response in ordered],
        responses=[response.tokens for response in ordered],
        rollout_log_probs=[response.log_probs for response in ordered],
    )
