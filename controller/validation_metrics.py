"""What validation says: means per data source, and best, worst and majority of n responses by bootstrap.

The bootstrap draws with the same random numbers as verl's, so both report the same figures for the same scores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from controller.metrics import is_numeric
from controller.summary import Accuracy
from rewards.manager import ScoreResult

_NUM_BOOTSTRAPS = 1000
_BOOTSTRAP_SEED = 42


@dataclass(frozen=True)
class Outcome:
    """One judged validation response.

    Attributes:
        data_source: of its prompt.
        prompt: identifies the prompt; the samples of one prompt share it.
        variables: "reward" and the other fields of the scorer; "acc", where there, is what counts, and "pred" is what
            a majority is taken of.
    """

    data_source: str
    prompt: Hashable
    variables: Mapping[str, Any]

    @classmethod
    def of(cls, data_source: str, prompt: Hashable, result: ScoreResult, row: int) -> Self:
        """The outcome of one row of a score result."""
        fields = {name: values[row] for name, values in result.extra.items() if values[row] is not None}
        return cls(data_source, prompt, {**fields, "reward": float(result.scores[row])})


def accuracy_by_source(outcomes: Iterable[Outcome]) -> Accuracy:
    """Mean over responses of "acc", or of the reward for a source without it; overall and per source.

    A response whose scorer failed, and so gave no "acc", counts as 0.

    Raises:
        ValueError: there is no outcome.
    """
    by_source: dict[str, list[float]] = defaultdict(list)
    outcomes = list(outcomes)
    core = _core_variables(outcomes)
    for outcome in outcomes:
        value = outcome.variables.get(core[outcome.data_source])
        by_source[outcome.data_source].append(float(value) if is_numeric(value) else 0.0)
    if not by_source:
        raise ValueError("a validation without any response has no accuracy")
    return Accuracy(
        overall=float(np.mean(np.concatenate(list(by_source.values())))),
        by_source={source: float(np.mean(values)) for source, values in by_source.items()},
    )


def validation_metrics(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """val/accuracy, val-core/<source>/<acc or reward>/mean@N and, for all variables and the rest, val-aux/...

    Figures are taken per prompt, then averaged over the prompts of a source. n runs through 2, 4, ... and N.
    """
    outcomes = list(outcomes)
    core = _core_variables(outcomes)
    prompts: dict[tuple[str, Hashable], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        prompts[outcome.data_source, outcome.prompt].append(outcome)
    collected: dict[str, list[float]] = defaultdict(list)
    for (source, _), group in prompts.items():
        for variable in {core[source]: None, **{name: None for outcome in group for name in outcome.variables}}:
            is_core = variable == core[source]
            for name, value in _prompt_metrics(group, variable, 0.0 if is_core else None).items():
                section = "val-core" if is_core and name.startswith("mean@") else "val-aux"
                collected[f"{section}/{source}/{variable}/{name}"].append(value)
    metrics = {name: float(np.mean(values)) for name, values in collected.items()}
    return {"val/accuracy": accuracy_by_source(outcomes).overall, **metrics}


def _core_variables(outcomes: Iterable[Outcome]) -> Mapping[str, str]:
    """The variable that counts, per data source."""
    core: dict[str, str] = {}
    for outcome in outcomes:
        if "acc" in outcome.variables or outcome.data_source not in core:
            core[outcome.data_source] = "acc" if "acc" in outcome.variables else "reward"
    return core


def _prompt_metrics(group: Sequence[Outcome], variable: str, missing: float | None) -> dict[str, float]:
    """All figures of one prompt and variable; samples without a number have the value `missing`, or are left out."""
    values = [(outcome.variables.get(variable, missing), outcome.variables.get("pred")) for outcome in group]
    judged = [(float(value), pred) for value, pred in values if is_numeric(value)]
    num_samples = len(judged)
    if num_samples == 0:
        return {}
    values_N = np.array([value for value, _ in judged])
    preds = [pred for _, pred in judged]
    metrics = {f"mean@{num_samples}": float(values_N.mean())}
    if num_samples == 1:
        return metrics
    metrics[f"std@{num_samples}"] = float(values_N.std())
    for n in _subset_sizes(num_samples):
        drawn_Kn = _bootstrap_indices(num_samples, n)
        chosen = {"best": values_N[drawn_Kn].max(axis=1), "worst": values_N[drawn_Kn].min(axis=1)}
        if any(pred is not None for pred in preds):
            pred_N = np.unique([str(pred) for pred in preds], return_inverse=True)[1]
            chosen["maj"] = values_N[_majority(pred_N, drawn_Kn)]
        for name, values_K in chosen.items():
            metrics[f"{name}@{n}/mean"], metrics[f"{name}@{n}/std"] = float(values_K.mean()), float(values_K.std())
    return metrics


def _subset_sizes(num_samples: int) -> Iterable[int]:
    """2, 4, 8, ... below the number of samples, then that number."""
    n = 2
    while n < num_samples:
        yield n
        n *= 2
    yield num_samples


@lru_cache
def _bootstrap_indices(num_samples: int, n: int) -> NDArray[np.int64]:
    """[_NUM_BOOTSTRAPS, n] draws with replacement, the same for every prompt."""
    return np.random.RandomState(_BOOTSTRAP_SEED).randint(0, num_samples, size=(_NUM_BOOTSTRAPS, n))


def _majority(pred_N: NDArray[np.int64], drawn_Kn: NDArray[np.int64]) -> NDArray[np.int64]:
    """Per draw, the sample that gave the most frequent answer first; of equally frequent ones the first seen."""
    drawn_preds_Kn = pred_N[drawn_Kn]
    votes_Kn = (drawn_preds_Kn[:, :, None] == drawn_preds_Kn[:, None, :]).sum(axis=2)
    return np.take_along_axis(drawn_Kn, votes_Kn.argmax(axis=1)[:, None], axis=1)[:, 0]
