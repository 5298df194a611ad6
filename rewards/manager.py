"""Scores of responses: every sample goes to the source that its data source is scored by."""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Self

from rewards.process_pool import ScoringProcesses
from rewards.registry import CUSTOM, has_scorer, scorer_name
from rewards.samples import Failure, Sample, Scored
from rewards.scoring_process import ScorerSetup
from rewards.source import ScoreSource
from splitppo.config import ConfigError, RewardConfig

log = logging.getLogger(__name__)


def check_data_sources(config: RewardConfig, data_sources: Iterable[str]) -> None:
    """ConfigError if there is no user's function and a data source has no scorer; the message lists the known ones."""
    if config.custom_function_path is not None:
        if not config.custom_function_path.is_file():
            raise ConfigError(f"key 'reward.custom_function_path': there is no file {config.custom_function_path}")
        return
    try:
        for data_source in sorted(data_sources):
            scorer_name(data_source)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def scored_sources(config: RewardConfig, data_sources: Iterable[str]) -> frozenset[str]:
    """Those of the data sources that have a reward function: all of them with a user's."""
    return frozenset(source for source in data_sources if config.custom_function_path is not None or has_scorer(source))


class RewardManager:
    """Sends each sample to the scorer of its data source; an async context manager that holds the sources of scores.

    Attributes:
        data_sources: those that it can score.

    Raises:
        ConfigError: a data source has no scorer; on entering: a source of scores cannot be started.
    """

    def __init__(self, config: RewardConfig, data_sources: Iterable[str]) -> None:
        self.data_sources = frozenset(data_sources)
        check_data_sources(config, self.data_sources)
        is_custom = config.custom_function_path is not None
        self._scorers = {source: CUSTOM if is_custom else scorer_name(source) for source in self.data_sources}
        self._sources = _sources(config, frozenset(self._scorers.values()))
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Starts the sources of scores."""
        async with AsyncExitStack() as starting:
            for source in dict.fromkeys(self._sources.values()):
                await starting.enter_async_context(source)
            self._open = starting.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def score(self, samples: Sequence[Sample], *, num_examine: int = 0) -> list[Scored]:
        """Scores all samples, one result each, and logs the first `num_examine` of each data source.

        Raises:
            RuntimeError: a source cannot go on, for a reason outside its scorers.
        """
        places: dict[ScoreSource, list[int]] = defaultdict(list)
        for place, sample in enumerate(samples):
            places[self._sources[self._scorers[sample.data_source]]].append(place)
        asked = [replace(sample, scorer=self._scorers[sample.data_source]) for sample in samples]
        parts = await asyncio.gather(*(source.score([asked[place] for place in of]) for source, of in places.items()))
        by_place = {
            place: scored
            for of, part in zip(places.values(), parts, strict=True)
            for place, scored in zip(of, part, strict=True)
        }
        results = [by_place[place] for place in range(len(samples))]
        _log_examples(samples, results, num_examine)
        _log_failures(results)
        return results


def _sources(config: RewardConfig, scorers: frozenset[str]) -> dict[str, ScoreSource]:
    """Who answers for each of these scorers. A source of its own stands here by its scorer's name."""
    setup = ScorerSetup(
        tuple(sorted(scorers)), config.timeout_s, config.custom_function_path, config.custom_function_name
    )
    return dict.fromkeys(scorers, ScoringProcesses(setup, config.num_workers))


def _log_examples(samples: Sequence[Sample], results: Sequence[Scored], num_examine: int) -> None:
    num_logged: Counter[str] = Counter()
    for sample, result in zip(samples, results, strict=True):
        if num_logged[sample.data_source] < num_examine:
            num_logged[sample.data_source] += 1
            names = ("data_source", "prompt", "response", "ground_truth")
            fields = {name: getattr(sample, name) for name in names} | {"score": result.score, **result.extra}
            log.info("%s", "\n".join(f"[{name}] {value}" for name, value in fields.items()))


def _log_failures(results: Sequence[Scored]) -> None:
    for failure in Failure:
        if messages := [result.message for result in results if result.failure is failure]:
            what = f"{len(messages)} of {len(results)} scores are 0 because of a {failure.value} in the reward function"
            log.warning("%s; the first: %s", what, messages[0])
