"""Scores of responses: each sample goes to the scorer of its data source, in the scoring processes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rewards.registry import scorer_name
from rewards.sandbox import Sandbox
from rewards.scoring_process import Call, Failure, Scored, ScorerSetup
from splitppo.config import ConfigError, RewardConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """A response to judge.

    Attributes:
        data_source: chooses the scorer.
        response: decoded, without the prompt and without special tokens.
        ground_truth: the row's `reward_model.ground_truth`.
        extra_info: the row's `extra_info`.
        prompt: decoded; only for the log.
    """

    data_source: str
    response: str
    ground_truth: Any
    extra_info: Any = None
    prompt: str = ""


@dataclass(frozen=True, eq=False)
class ScoreResult:
    """Scores of B samples.

    Attributes:
        scores: [B] float32; 0 where the scorer failed.
        extra: the other fields of the scorers' dicts: B values per field, None where a sample has none.
        num_timeouts: calls killed, or over the time limit.
        num_crashes: calls that ended their process.
        num_errors: calls that raised, or returned no finite score.
    """

    scores: NDArray[np.float32]
    extra: Mapping[str, Sequence[Any]]
    num_timeouts: int
    num_crashes: int
    num_errors: int


def check_data_sources(config: RewardConfig, data_sources: Iterable[str]) -> None:
    """ConfigError if there is no user's function and a data source has no scorer; the message lists the known ones."""
    if config.custom_function_path is None:
        for data_source in sorted(set(data_sources)):
            try:
                scorer_name(data_source)
            except ValueError as error:
                raise ConfigError(str(error)) from error
    elif not config.custom_function_path.is_file():
        raise ConfigError(f"key 'reward.custom_function_path': there is no file {config.custom_function_path}")


class RewardManager:
    """Scores samples; an async context manager that holds the scoring processes.

    Args:
        config: the function, the number of processes, the time limit per call.
        data_sources: all sources of training and validation data.

    Raises:
        ConfigError: a source has no scorer; on entering: a user's function cannot be loaded.
    """

    def __init__(self, config: RewardConfig, data_sources: Iterable[str]) -> None:
        sources = tuple(sorted(set(data_sources)))
        check_data_sources(config, sources)
        setup = ScorerSetup(sources, config.timeout_s, config.custom_function_path, config.custom_function_name)
        self._sandbox = Sandbox(setup, config.num_workers)

    async def __aenter__(self) -> Self:
        await self._sandbox.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._sandbox.close()

    async def score(self, samples: Sequence[Sample], *, num_examine: int = 0) -> ScoreResult:
        """Scores all samples and logs the first `num_examine` of each data source."""
        calls = [
            Call(sample.data_source, sample.response, sample.ground_truth, sample.extra_info) for sample in samples
        ]
        scored = await self._sandbox.run(calls)
        _log_examples(samples, scored, num_examine)
        failures = Counter(result.failure for result in scored)
        _log_failures(scored, failures)
        fields = {key: None for result in scored for key in result.extra}
        return ScoreResult(
            scores=np.array([result.score for result in scored], np.float32),
            extra={key: [result.extra.get(key) for result in scored] for key in fields},
            num_timeouts=failures[Failure.TIMEOUT],
            num_crashes=failures[Failure.CRASH],
            num_errors=failures[Failure.ERROR],
        )


def _log_examples(samples: Sequence[Sample], scored: Sequence[Scored], num_examine: int) -> None:
    shown: Counter[str] = Counter()
    for sample, result in zip(samples, scored, strict=True):
        if shown[sample.data_source] < num_examine:
            shown[sample.data_source] += 1
            log.info(
                "[data_source] %s\n[prompt] %s\n[response] %s\n[ground_truth] %s\n[score] %s%s",
                sample.data_source,
                sample.prompt,
                sample.response,
                sample.ground_truth,
                result.score,
                "".join(f"\n[{key}] {value}" for key, value in result.extra.items()),
            )


def _log_failures(scored: Sequence[Scored], failures: Mapping[Failure | None, int]) -> None:
    for failure in Failure:
        if failures[failure]:
            first = next(result for result in scored if result.failure is failure)
            log.warning(
                "%d of %d scores are 0 because of a %s in the reward function; the first: %s",
                failures[failure],
                len(scored),
                failure.value,
                first.message,
            )
