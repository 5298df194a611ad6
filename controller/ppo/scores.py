"""The scores of a step's responses, as arrays with one row per response, with their texts and failures.

`controller/scoring` makes the scores, `controller/ppo` computes with them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray

from controller.ppo.masked_stats import Float32s, Mask
from rewards.returned import LARGEST
from splitppo.batch import Column
from splitppo.config import ConfigError

Objects = NDArray[np.object_]


@dataclass(frozen=True)
class Text:
    """A decoded response with its prompt and its ground truth, for the rollout files and the log."""

    prompt: str
    response: str
    ground_truth: Any


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of B responses, in the order of the rollouts. Every column has one row per response.

    Attributes:
        scores: float32, the sum of all parts; 0 if the scorer failed.
        rule_scores: float32, the part of the scorers; NaN if the data source has no scorer.
        model_scores: float32, the scores of the reward model; None if it was not asked.
        token_scores: float32, the part of `scores` that is placed on tokens: one number per response token, or an empty
            row if nothing of the response's score is placed.
        rule_token_scores: float32, the part of `rule_scores` that is placed on tokens, in the same form.
        has_eos: bool, True if the response ends with an EOS token.
        has_stopped: bool, True if the response contains a text of `rollout.stop`.
        is_truncated: bool, True if the response was cut off at `data.max_response_length`.
        data_sources: str, the data source of the prompt.
        prompt_indices: int64, the index of the prompt's row in the table of prompts.
        places: str, the file and row of the prompt, e.g. "train.parquet, row 3".
        failures: the reason why a scorer gave no score, or None.
        messages: str, the failure in a sentence.
        extra: mappings, the other fields of the scorer's dict, and of the environment.
        conversations: `Conversation` (controller/conversations), or None for a response with one turn.
        texts: `Text`, for rollout files and the log alone.
    """

    scores: Float32s
    rule_scores: Float32s
    model_scores: Float32s | None
    token_scores: Column
    rule_token_scores: Column
    has_eos: Mask
    has_stopped: Mask
    is_truncated: Mask
    data_sources: Objects
    prompt_indices: NDArray[np.int64]
    places: Objects
    failures: Objects
    messages: Objects
    extra: Objects
    conversations: Objects
    texts: Objects

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Concatenates the rows of several `Scores` into one, in order."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: _joined([getattr(part, name) for part in parts]) for name in names})

    def take(self, rows: NDArray[np.int64]) -> "Scores":
        """Returns the scores of the responses with these row numbers, in this order."""
        columns = vars(self).items()
        taken: dict[str, Any] = {name: None if column is None else column.take(rows) for name, column in columns}
        return Scores(**taken)

    def first(self, num_rows: int) -> "Scores":
        """Returns the scores of the first responses, of all if there are fewer."""
        return self.take(np.arange(min(num_rows, self.num_rows)))

    @property
    def num_rows(self) -> int:
        """The number of scored responses, B."""
        return len(self.scores)

    @property
    def extra_columns(self) -> dict[str, list[Any]]:
        """The B values of each further field that a scorer returned (`extra`); None if a response lacks the field."""
        names = {name: None for extra in self.extra for name in extra}
        return {name: [extra.get(name) for extra in self.extra] for name in names}

    def components(self, names: Sequence[str]) -> Float32s | None:
        """Returns named parts of the scores as [K, B] float32: fields of `extra`, or `score`; None without names.

        The part is 0 for a response that lacks the field, for instance because its scorer failed.

        Raises:
            ConfigError: no response has the field, or a response has no number there of at most LARGEST in size.
        """
        if not names:
            return None
        columns = {"score": self.scores.tolist(), **self.extra_columns}
        return np.array([self._component(name, columns) for name in names], np.float32)

    def _component(self, name: str, columns: dict[str, list[Any]]) -> list[float]:
        """Returns the field `name` of each response, [B], 0 where it is missing; ConfigError if no response has it.

        A field that is there must be a number as `is_numeric` says, else a ConfigError names the response.
        """
        key = "key 'algorithm.gdpo_reward_keys'"
        values = columns.get(name, [])
        if all(value is None for value in values):
            numeric = ", ".join(field for field, some in columns.items() if any(map(is_numeric, some)))
            raise ConfigError(f"{key}: no response has the field {name!r}; known: {numeric}")
        for value, place, source in zip(values, self.places, self.data_sources, strict=True):
            if value is not None and not is_numeric(value):
                got = f"got {value!r} for {place}, data_source {source!r}"
                expected = f"a finite number of at most {LARGEST:g}"
                raise ConfigError(f"{key}: expected {expected} in the field {name!r}, {got}")
        return [0.0 if value is None else float(value) for value in values]


def objects(values: Iterable[Any]) -> Objects:
    """Converts Python objects into a one-dimensional numpy array of objects, even if the objects are sequences."""
    return np.fromiter(values, np.dtype(np.object_))


def is_numeric(value: object) -> TypeGuard[float]:
    """Returns True if a metric can be made of a field that a scorer returned: a number or a bool, not over LARGEST."""
    return isinstance(value, bool | int | float) and abs(value) <= LARGEST  # not so for NaN


def _joined(columns: Sequence[Any]) -> Any:
    """Concatenates columns of the same name (arrays or ragged columns); None if one of them is missing."""
    if any(column is None for column in columns):
        return None
    if isinstance(columns[0], Column):
        values, lengths = zip(*((column.values, column.lengths) for column in columns), strict=True)
        return Column(np.concatenate(values), np.concatenate(lengths))
    return np.concatenate(columns)
