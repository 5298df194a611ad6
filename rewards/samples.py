"""What goes into a scorer and what comes out. Imported by the scoring processes, so it stays light."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


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


class Failure(Enum):
    """Why a scorer gave no score, as metrics name it. A response that is wrong, however badly, has one: 0."""

    ERROR = "errors"  # it raised, or returned something that is no finite score
    TIMEOUT = "timeouts"  # it took longer than its time limit
    CRASH = "crashes"  # it ended its process
    UNAVAILABLE = "unavailable"  # a judge that cannot be reached, or says that it cannot answer now
    UNPARSABLE = "unparsable"  # a judge's answer without a score


@dataclass(frozen=True)
class Scored:
    """What a call gave: score and the other fields of its dict; after a failure 0, and a sentence."""

    score: float
    extra: Mapping[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    message: str = ""
