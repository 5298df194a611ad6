"""The input of a scorer (`Sample`) and its output (`Scored`).

Scoring processes import this module, so it imports nothing heavy.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Span = tuple[int, int]  # [start, end), in characters of a response
Step = tuple[int, int, float]  # a span and its score


@dataclass(frozen=True)
class Sample:
    """A response to be scored, with the prompt and the fields of the data set row that it belongs to."""

    data_source: str  # selects the scorer
    response: str  # decoded, without the prompt and without special tokens
    ground_truth: Any  # the row's `reward_model.ground_truth`
    extra_info: Any = None
    prompt: str = ""  # as the policy reads it; for the log and for a judge
    messages: Sequence[Mapping[str, Any]] = ()  # the prompt, or what the last context began with; for a judge
    last_turn: str = ""  # the last turn of a conversation; of one turn: the response
    last_context: str | None = None  # what the response says in its last context; None: it has one
    scorer: str = ""  # the scorer that is asked, a name of the registry; set by the manager
    number: int = 0  # of the response among those that share a limit of failures; set by the manager
    token_spans: Sequence[Span] = ()  # the part of `response` that each response token stands for; together all of it


def sample_text(heading: str, fields: Mapping[str, Any]) -> str:
    """Formats a sample as text for the log or the terminal: the heading, then one indented line for each field."""
    lines = (f"{name}: {f'{value:g}' if isinstance(value, float) else value}" for name, value in fields.items())
    return "\n".join([heading, *("  " + line.replace("\n", "\n    ") for line in lines)])


class Failure(Enum):
    """The reason why a scorer gave no score, as metrics name it; a wrong response is no failure: it scores 0."""

    ERROR = "errors"  # the scorer raised, or returned something that is no finite score
    TIMEOUT = "timeouts"  # the scorer took longer than its time limit
    CRASH = "crashes"  # the scorer ended its process
    UNAVAILABLE = "unavailable"  # the judge cannot be reached, or says that it cannot answer now
    UNPARSABLE = "unparsable"  # the judge's answer has no score


@dataclass(frozen=True)
class Scored:
    """The result of a scorer for one response: its scores, further fields, and the failure if there was one.

    Attributes:
        score: the score of the response as a whole; 0 after a failure.
        extra: the other fields of the scorer's dict.
        failure, message: the reason why there is no score, and a sentence about this reason.
        token_scores: one further score for each response token, or empty.
        step_scores: further scores of spans of the response, or empty.
    """

    score: float
    extra: Mapping[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    message: str = ""
    token_scores: Sequence[float] = ()
    step_scores: Sequence[Step] = ()

    @property
    def total(self) -> float:
        """The sum of the response's score and of all scores of its tokens and steps."""
        return self.score + math.fsum(self.token_scores) + math.fsum(score for _, _, score in self.step_scores)
