"""A source of scores: the scoring processes, and whatever else answers for a scorer."""

from collections.abc import Sequence
from typing import Protocol, Self

from rewards.samples import Sample, Scored


class ScoreSource(Protocol):
    """Scores samples; an async context manager, entered once, open while the run lasts.

    Raises:
        ConfigError: on entering: what it needs is not there, in one sentence.
    """

    async def __aenter__(self) -> Self:
        """Starts what it needs."""
        ...

    async def __aexit__(self, *_: object) -> None:
        """Ends all of it, also in the middle of a call."""
        ...

    async def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """One result per sample, in their order; what goes wrong with a sample is a result with a failure.

        `sample.scorer` says which scorer is meant. Several calls may be under way at once.
        """
        ...
