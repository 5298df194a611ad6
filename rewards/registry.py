"""Which scorer judges which data source, and a user's scorer from a file.

Imported by the scoring processes, so it stays light: scorers are imported when they are first asked for.
"""

import inspect
import pkgutil
from collections.abc import Awaitable, Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rewards.user_file import load_from_file

# A user's function, as a scorer's name.
CUSTOM = "custom"
# What a call is given by name; a batched function takes lists of as many.
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = tuple(f"{name}s" for name in ARGUMENTS)
# compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | {"score": float, ...}
ComputeScore = Callable[..., Any | Awaitable[Any]]

# The scorer's place by data source. A name also covers its parts: "math" is asked for "math/algebra" too.
SCORERS: Mapping[str, str] = {
    "gsm8k": "rewards.gsm8k:compute_score",
    "openai/gsm8k": "rewards.gsm8k:compute_score",
    "gsm8k_flexible": "rewards.gsm8k:compute_flexible_score",
    "math": "rewards.competition_math:compute_score",
    "hendrycks/competition_math": "rewards.competition_math:compute_score",
    "EleutherAI/hendrycks_math": "rewards.competition_math:compute_score",
    "lighteval/MATH": "rewards.competition_math:compute_score",
    "DigitalLearningGmbH/MATH-lighteval": "rewards.competition_math:compute_score",
    "HuggingFaceH4/MATH-500": "rewards.competition_math:compute_score",
    "Rowan/hellaswag": "rewards.hellaswag:compute_score",
    "sort_letters": "rewards.sort_letters:compute_score",
}


def covering(data_source: str, names: Container[str]) -> str | None:
    """The name that covers a data source: its own, or that of the longest part it begins with; None if none does."""
    candidate = data_source
    while candidate not in names:
        candidate, separator, _ = candidate.rpartition("/")
        if not separator:
            return None
    return candidate


def scorer_name(data_source: str) -> str:
    """The key of SCORERS that covers a data source; ValueError with the known ones if none does."""
    name = covering(data_source, SCORERS)
    if name is None:
        raise ValueError(
            f"no reward for data_source {data_source!r}; known: {', '.join(SCORERS)};"
            " for any other set reward.custom_function_path to a file with a compute_score function, or reward.scorers"
        )
    return name


@dataclass(frozen=True)
class Scorer:
    """A scoring function, how it is called, and what with besides a sample's fields."""

    function: ComputeScore
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_batched: bool = False  # it takes the lists of several samples at once

    @property
    def is_async(self) -> bool:
        """Whether calls give awaitables."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(self.function.__call__)  # type: ignore[operator]


def load_scorer(name: str) -> Scorer:
    """The built-in scorer of that name, a key of SCORERS."""
    return Scorer(pkgutil.resolve_name(SCORERS[name]))


def load_custom_scorer(path: Path, name: str, kwargs: Mapping[str, Any]) -> Scorer:
    """Imports a user's file and takes its scoring function, which is batched if it has an argument `solution_strs`.

    Raises:
        ValueError: the file cannot be imported, or has no function of that name and signature, or it does not take
            these further arguments.
    """
    function: ComputeScore = load_from_file(
        path, name, path_key="reward.custom_function_path", name_key="reward.custom_function_name"
    )
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise ValueError(f"{name} in {path}: {error}") from error
    is_batched = BATCH_ARGUMENTS[1] in signature.parameters
    arguments = BATCH_ARGUMENTS if is_batched else ARGUMENTS
    try:
        signature.bind_partial(**dict.fromkeys(arguments))
    except TypeError as error:
        shown = f"{', '.join(arguments[:-1])}, {arguments[-1]}=None"
        raise ValueError(f"{name} in {path} must take ({shown}): {error}") from error
    try:
        signature.bind(**dict.fromkeys(arguments), **kwargs)
    except TypeError as error:
        raise ValueError(f"key 'reward.custom_function_kwargs': {name}{signature} in {path}: {error}") from error
    return Scorer(function, kwargs, is_batched)
