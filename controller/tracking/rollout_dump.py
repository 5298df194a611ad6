"""Converts scored rollouts into rows of JSONL: all rollouts of a step (`tracking.dump_rollouts`), or a few samples."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from controller.ppo.scores import Scores


def sample_rows(scores: Scores) -> Iterator[dict[str, Any]]:
    """Yields for every response a dict of data source, prompt, response, ground truth and score."""
    for source, text, score in zip(scores.data_sources, scores.texts, scores.scores.tolist(), strict=True):
        yield {"data_source": source, **vars(text), "score": score}


def first_samples(scores: Scores, num_samples: int) -> list[dict[str, Any]]:
    """Returns the rows of the first `num_samples` responses."""
    return list(islice(sample_rows(scores), num_samples))


def rollout_rows(scores: Scores) -> Iterator[dict[str, Any]]:
    """Yields each response's row in the rollout files: `sample_rows`, parts of the score, the scorer's fields."""
    columns: dict[str, list[Any]] = {}
    if scores.model_scores is not None:
        columns |= {"rule_score": scores.rule_scores.tolist(), "model_score": scores.model_scores.tolist()}
    if len(scores.token_scores.values):
        columns["token_scores"] = [row.tolist() or None for row in scores.token_scores.rows()]
    if any(one is not None for one in scores.conversations):
        facts = [{} if one is None else {**one.facts, "environment_error": one.lost} for one in scores.conversations]
        columns |= {name: [row.get(name) for row in facts] for name in facts[0]}
    columns |= scores.extra_columns
    for index, row in enumerate(sample_rows(scores)):
        yield row | {name: values[index] for name, values in columns.items()}
