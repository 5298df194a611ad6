"""Computes validation metrics: means per data source, and best, worst and majority of n responses by bootstrap.

The bootstrap draws the same random numbers as verl's, so that both report the same figures for the same scores.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.ppo.scores import Scores, is_numeric
from splitppo.run_folder.summary import Accuracy

_NUM_BOOTSTRAPS = 1000
_BOOTSTRAP_SEED = 42


def accuracy_by_source(scores: Scores) -> Accuracy:
    """Computes the accuracy over all responses and per data source, as an `Accuracy`.

    The accuracy is the mean of the scorer's field "acc"; for a data source without "acc", the mean of the reward. A
    response whose scorer failed has no "acc" and counts as 0.

    Raises:
        ValueError: there is no response.
    """
    by_source: dict[str, list[float]] = defaultdict(list)
    core = _core_variables(scores)
    for source, variables in zip(scores.data_sources, _variables(scores), strict=True):
        value = variables.get(core[source])
        by_source[source].append(float(value) if is_numeric(value) else 0.0)
    if not by_source:
        raise ValueError("a validation without any response has no accuracy")
    return Accuracy(
        overall=float(np.mean(np.concatenate(list(by_source.values())))),
        by_source={source: float(np.mean(values)) for source, values in by_source.items()},
    )


def validation_metrics(scores: Scores) -> dict[str, float]:
    """Computes the metrics val/accuracy, val-core/<source>/<acc or reward>/..., and val-aux/... from scores.

    Each metric is computed per prompt, then averaged over the prompts of a data source. n is 2, 4, ... and N, the
    number of responses per prompt. As in verl, val-core has mean, best and majority of all N responses, of the variable
    "acc", or of the reward without "acc"; val-aux has the rest. The majority is the score of the most frequent answer;
    answers are compared by the field "pred".
    """
    core = _core_variables(scores)
    prompts: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for source, index, variables in zip(scores.data_sources, scores.prompt_indices, _variables(scores), strict=True):
        prompts[source, index].append(variables)
    collected: dict[str, list[float]] = defaultdict(list)
    for (source, _), answers in prompts.items():
        # Each variable once: the core one, which an answer may lack, then the others in the order of the answers.
        for variable in {core[source]: None, **{name: None for answer in answers for name in answer}}:
            is_core = variable == core[source]
            missing = 0.0 if is_core else None  # a response without the core variable counts 0; others are left out
            for name, value in _prompt_metrics(answers, variable, missing).items():
                section = "val-core" if is_core and _is_core_metric(name, len(answers)) else "val-aux"
                collected[f"{section}/{source}/{variable}/{name}"].append(value)
    metrics = {name: float(np.mean(values)) for name, values in collected.items()}
    return {"val/accuracy": accuracy_by_source(scores).overall, **metrics}


def _is_core_metric(name: str, num_samples: int) -> bool:
    """Returns True for the metrics that verl has in val-core: mean, best and majority of all responses of a prompt."""
    kind, _, n = name.partition("/")[0].partition("@")
    return kind == "mean" or (kind in ("best", "maj") and int(n) == num_samples)


def _variables(scores: Scores) -> list[dict[str, Any]]:
    """Returns for each response a dict of the scorer's fields that are not None, and of its score under "reward"."""
    return [
        {**{name: value for name, value in extra.items() if value is not None}, "reward": score}
        for extra, score in zip(scores.extra, scores.scores.tolist(), strict=True)
    ]


def _core_variables(scores: Scores) -> dict[str, str]:
    """Returns by data source the variable that val-core reports: "acc" if a response has it, else "reward"."""
    pairs = zip(scores.data_sources, scores.extra, strict=True)
    with_acc = {source for source, extra in pairs if is_numeric(extra.get("acc"))}
    return {source: "acc" if source in with_acc else "reward" for source in scores.data_sources}


def _prompt_metrics(answers: Sequence[Mapping[str, Any]], variable: str, missing: float | None) -> dict[str, float]:
    """Computes mean, std, best, worst, majority of a variable over one prompt's responses; `missing` fills in gaps."""
    values = [answer.get(variable) for answer in answers]
    known = [value if is_numeric(value) else missing for value in values]
    numbers = [
        (float(value), answer.get("pred")) for value, answer in zip(known, answers, strict=True) if value is not None
    ]
    if (num_samples := len(numbers)) == 0:
        return {}
    values_N = np.array([value for value, _ in numbers])
    preds = [pred for _, pred in numbers]
    metrics = {f"mean@{num_samples}": float(values_N.mean())}
    if num_samples == 1:
        return metrics
    metrics[f"std@{num_samples}"] = float(values_N.std())
    for n in sorted({num_samples, *(2**exponent for exponent in range(1, num_samples.bit_length()))}):
        drawn_Kn = _bootstrap_indices(num_samples, n)
        chosen = {"best": values_N[drawn_Kn].max(axis=1), "worst": values_N[drawn_Kn].min(axis=1)}
        if any(pred is not None for pred in preds):
            pred_N = np.unique([str(pred) for pred in preds], return_inverse=True)[1]
            chosen["maj"] = values_N[_majority(pred_N, drawn_Kn)]
        for name, values_K in chosen.items():
            metrics[f"{name}@{n}/mean"] = float(values_K.mean())
            metrics[f"{name}@{n}/std"] = float(values_K.std())
    return metrics


@lru_cache
def _bootstrap_indices(num_samples: int, n: int) -> NDArray[np.int64]:
    """Draws random sample indices [_NUM_BOOTSTRAPS, n] with replacement, the same for every prompt."""
    return np.random.RandomState(_BOOTSTRAP_SEED).randint(0, num_samples, size=(_NUM_BOOTSTRAPS, n))


def _majority(pred_N: NDArray[np.int64], drawn_Kn: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns for each bootstrap draw the first sample with the most frequent answer; in a tie, of the first answer."""
    drawn_preds_Kn = pred_N[drawn_Kn]
    votes_Kn = (drawn_preds_Kn[:, :, None] == drawn_preds_Kn[:, None, :]).sum(axis=2)
    return np.take_along_axis(drawn_Kn, votes_Kn.argmax(axis=1)[:, None], axis=1)[:, 0]
