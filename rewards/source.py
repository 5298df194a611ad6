"""A source of scores: the scoring processes, and whatever else answers for a scorer."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from rewards.samples import Sample, Scored


class ScoreSource(AbstractAsyncContextManager["ScoreSource"], Protocol):
    """Scores samples; a context manager, entered once and open while the run lasts.

    Leaving it ends everything that it has started, also in the middle of a call.

    Raises:
        ConfigError: on entering: something that it needs is missing; one sentence.
    """

    async def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """Returns one result per sample, in their order; a sample that cannot be scored has a result with a failure.

        `sample.scorer` is the name of the scorer that is asked. Several calls may be under way at once.
        """
        ...
