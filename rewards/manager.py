"""Scores the responses of a batch: calls the scorers of each sample's data source, and adds up their scores."""

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Self

from rewards.code.source import CodeSandboxes
from rewards.process_pool import ScoringProcesses
from rewards.registry import is_code
from rewards.samples import Failure, Sample, Scored, sample_text
from rewards.scorers.symbolic import SYMBOLIC, SymbolicOutcome
from rewards.scoring_process import ScorerSetup
from rewards.source import NOT_SCORED, FailureLimit, ScoreSource
from rewards.terms import JUDGE, check_scorers, terms_of
from rewards.token_scores import place_steps, weighted
from splitppo.config import RewardConfig
from splitppo.config.sections.reward import Term

log = logging.getLogger(__name__)


class RewardManager:
    """Scores responses with the scorers of their data sources; an async context manager for all scoring processes.

    Args:
        answers_file: the file that stores a judge's answers; None: they are stored in memory while the process lives.

    Attributes:
        data_sources: the data sources whose samples can be scored here.

    Raises:
        ConfigError: a data source has no scorer; on entering: scoring cannot be started.
    """

    def __init__(self, config: RewardConfig, data_sources: Iterable[str], answers_file: Path | None = None) -> None:
        self.data_sources = frozenset(data_sources)
        check_scorers(config, self.data_sources)
        self._terms = {source: terms_of(config, source) for source in self.data_sources}
        self._sources = _sources(config, {term.name for terms in self._terms.values() for term in terms}, answers_file)
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Starts what the scorers need: scoring processes, sandboxes, the connection to a judge."""
        async with AsyncExitStack() as starting:
            for source in dict.fromkeys(self._sources.values()):
                await starting.enter_async_context(source)
            self._open = starting.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def score(
        self, samples: Sequence[Sample], *, num_examine: int = 0, limit: FailureLimit | None = None
    ) -> list[Scored]:
        """Scores samples, one result per sample in the same order; logs the first `num_examine` of each data source.

        `limit` may be that of several calls; by default every sample may fail.

        Raises:
            RuntimeError, OSError: scoring cannot go on, for a reason outside the scorers.
        """
        terms = [self._terms[sample.data_source] for sample in samples]
        results = await self._score(samples, terms, limit or FailureLimit())
        _log_examples(samples, results, num_examine)
        _log_failures(results)
        _log_symbolic(results)
        return results

    async def try_functions(self, samples: Sequence[Sample]) -> list[Scored | None]:
        """Scores samples as a trial by functions alone; None for a sample that only a judge or a program scores."""
        terms = [
            [term for term in self._terms[sample.data_source] if term.name != JUDGE and not is_code(term.name)]
            for sample in samples
        ]
        results = await self._score(samples, terms, FailureLimit())
        return [result if own else None for result, own in zip(results, terms, strict=True)]

    async def _score(
        self, samples: Sequence[Sample], terms: Sequence[Sequence[Term]], limit: FailureLimit
    ) -> list[Scored]:
        """Scores each sample with its scorers, and adds up their scores."""
        asked = [
            replace(sample, scorer=term.name, number=number)
            for sample, own, number in zip(samples, terms, limit.numbers(len(samples)), strict=True)
            for term in own
        ]
        scored = iter(await self._ask(asked, limit))
        summed = [weighted_sum(own, [next(scored) for _ in own]) for own in terms]
        return await asyncio.to_thread(
            lambda: [place_steps(result, sample.token_spans) for result, sample in zip(summed, samples, strict=True)]
        )

    async def _ask(self, samples: Sequence[Sample], limit: FailureLimit) -> list[Scored]:
        """Scores each sample with the scorer `sample.scorer`; functions, sandboxes and judge work at the same time."""
        places: dict[ScoreSource, list[int]] = defaultdict(list)
        for place, sample in enumerate(samples):
            places[self._sources[sample.scorer]].append(place)
        parts = await asyncio.gather(
            *(source.score([samples[place] for place in own], limit) for source, own in places.items())
        )
        by_place = dict(zip(chain(*places.values()), chain(*parts), strict=True))
        return [by_place[place] for place in range(len(samples))]


def weighted_sum(terms: Sequence[Term], results: Sequence[Scored]) -> Scored:
    """Adds up the results of several scorers for one sample, each multiplied by the weight of its scorer.

        score = sum of weight * score over the terms; scores of tokens and steps are multiplied likewise

    Unless there is only one scorer, of weight 1, the field <name>_score keeps the score of each. If several scorers
    give a field of the same name, the field of the first one is kept. A scorer that failed adds 0; the first failure
    of a scorer that was called is the failure of the sample.
    """
    if len(terms) == 1 and terms[0].weight == 1.0:
        return results[0]
    extra = {name: value for scored in reversed(results) for name, value in scored.extra.items()}
    extra |= {f"{term.name}_score": scored.total for term, scored in zip(terms, results, strict=True)}
    failures = [scored for scored in results if scored.failure is not None]
    failed = min(failures, key=lambda scored: scored.message == NOT_SCORED, default=None)
    parts = [weighted(term.weight, scored) for term, scored in zip(terms, results, strict=True)]
    of_tokens = [part.token_scores for part in parts if part.token_scores]
    return Scored(
        score=sum(part.score for part in parts),
        token_scores=tuple(map(math.fsum, zip(*of_tokens, strict=True))),
        step_scores=tuple(chain.from_iterable(part.step_scores for part in parts)),
        extra=extra,
        failure=failed.failure if failed else None,
        message=failed.message if failed else "",
    )


def _sources(config: RewardConfig, scorers: Collection[str], answers_file: Path | None) -> dict[str, ScoreSource]:
    """Creates the processes, sandboxes and judge that run the named scorers; returns the object by scorer name."""
    code = frozenset(filter(is_code, scorers))
    functions = tuple(sorted(name for name in scorers if name != JUDGE and name not in code))
    sources: dict[str, ScoreSource] = {}
    if functions:
        path = config.custom_function_path
        custom = None if path is None else (path, config.custom_function_name, config.custom_function_kwargs)
        setup = ScorerSetup(functions, config.timeout_s, custom)
        sources |= dict.fromkeys(functions, ScoringProcesses(setup, config.num_workers))
    if code:
        sources |= dict.fromkeys(code, CodeSandboxes(config.code))
    if JUDGE in scorers:
        from rewards.judge.source import Judge  # a run without a judge loads no HTTP client

        sources[JUDGE] = Judge(config.judge, answers_file)
    return sources


def _log_examples(samples: Sequence[Sample], results: Sequence[Scored], num_examine: int) -> None:
    """Logs the first `num_examine` samples of each data source, with their scores."""
    num_logged: Counter[str] = Counter()
    for sample, result in zip(samples, results, strict=True):
        if num_logged[sample.data_source] < num_examine:
            num_logged[sample.data_source] += 1
            fields = {"prompt": sample.prompt, "response": sample.response, "ground truth": sample.ground_truth}
            heading = f"sample ({sample.data_source}), score {result.total:g}"
            log.info("%s", sample_text(heading, fields | dict(result.extra)))


def _log_failures(results: Sequence[Scored]) -> None:
    """Logs, for each kind of failure, how many responses have no score, and the first reason."""
    for failure in Failure:
        if messages := [result.message for result in results if result.failure is failure]:
            count = f"{len(messages)} of {len(results)} responses have no score from a scorer ({failure.value})"
            log.warning("%s; the first: %s", count, messages[0])


def _log_symbolic(results: Sequence[Scored]) -> None:
    """Logs how many answers sympy could not compare in time, and how many it was not asked about afterwards."""
    counted = Counter(result.extra.get(SYMBOLIC) for result in results)
    if num_given_up := counted[SymbolicOutcome.GAVE_UP.value]:
        count = f"{num_given_up} of {len(results)} answers could not be compared by sympy in time"
        num_skipped = counted[SymbolicOutcome.SKIPPED.value]
        log.warning("%s, and %d after them were compared by their spelling alone", count, num_skipped)
