"""The input and the output of a scorer. Imported by the scoring processes, so it stays light."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Span = tuple[int, int]  # [start, end), in characters of a response
Step = tuple[int, int, float]  # a span and its score


@dataclass(frozen=True)
class Sample:
    """A response to score."""

    data_source: str  # chooses its scorer
    response: str  # decoded, without the prompt and without special tokens
    ground_truth: Any  # the row's `reward_model.ground_truth`
    extra_info: Any = None
    prompt: str = ""  # as the policy reads it; for the log and for a judge
    messages: Sequence[Mapping[str, Any]] = ()  # the prompt as a conversation; for a judge
    scorer: str = ""  # who is asked, a name of the registry; the manager fills it in
    token_spans: Sequence[Span] = ()  # what each response token holds of `response`: neighbours that make it up


def sample_text(heading: str, fields: Mapping[str, Any]) -> str:
    """A sample as the log and the display show it: its heading, and below it each field, indented."""
    lines = (f"{name}: {f'{value:g}' if isinstance(value, float) else value}" for name, value in fields.items())
    return "\n".join([heading, *("  " + line.replace("\n", "\n    ") for line in lines)])


class Failure(Enum):
    """Why a scorer gave no score, as metrics name it. A response that is wrong, however badly, has one: 0."""

    ERROR = "errors"  # it raised, or returned something that is no finite score
    TIMEOUT = "timeouts"  # it took longer than its time limit
    CRASH = "crashes"  # it ended its process
    UNAVAILABLE = "unavailable"  # a judge that cannot be reached, or says that it cannot answer now
    UNPARSABLE = "unparsable"  # a judge's answer without a score


@dataclass(frozen=True)
class Scored:
    """The result of a call: scores and the other fields of its dict; after a failure 0, and a sentence.

    Attributes:
        score: of the response as a whole.
        token_scores: on top of it, one for each response token; or empty.
        step_scores: likewise, of spans of the response.
    """

    score: float
    extra: Mapping[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    message: str = ""
    token_scores: Sequence[float] = ()
    step_scores: Sequence[Step] = ()

    @property
    def total(self) -> float:
        """The response's score, wherever its parts are placed."""
        return self.score + math.fsum(self.token_scores) + math.fsum(score for _, _, score in self.step_scores)
