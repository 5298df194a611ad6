"""Which scorer judges which data source, and a user's scorer from a file.

Imported by the scoring processes, so it stays light: scorers are imported when they are first asked for.
"""

import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

# compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | {"score": float, ...}
ComputeScore = Callable[..., Any | Awaitable[Any]]

# The scorer's name where a user's function scores.
CUSTOM = "custom"

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
    "sort_letters": "rewards.sort_letters:compute_score",
}


def scorer_name(data_source: str) -> str:
    """The key of SCORERS that covers a data source; ValueError with the known ones if none does."""
    candidate = data_source
    while candidate not in SCORERS:
        candidate, separator, _ = candidate.rpartition("/")
        if not separator:
            raise ValueError(
                f"no reward for data_source {data_source!r}; known: {', '.join(SCORERS)};"
                " for any other set reward.custom_function_path to a file with a compute_score function"
            )
    return candidate


def has_scorer(data_source: str) -> bool:
    """Whether a built-in scorer covers a data source."""
    try:
        scorer_name(data_source)
    except ValueError:
        return False
    return True


def load_scorer(name: str) -> ComputeScore:
    """The built-in scorer of that name, a key of SCORERS."""
    scorer: ComputeScore = pkgutil.resolve_name(SCORERS[name])
    return scorer


def load_custom_scorer(path: Path, function: str) -> ComputeScore:
    """Imports a user's file and takes its scoring function.

    Raises:
        ValueError: the file cannot be imported, or has no function of that name and signature.
    """
    spec = importlib.util.spec_from_file_location("splitppo_custom_reward", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"key 'reward.custom_function_path': {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # before it runs: dataclasses and pickle look the module up by its name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"importing the reward file {path} failed: {type(error).__name__}: {error}") from error
    scorer: ComputeScore | None = getattr(module, function, None)
    if not callable(scorer):
        raise ValueError(f"key 'reward.custom_function_name': {path} has no function {function!r}")
    try:
        inspect.signature(scorer).bind(data_source="", solution_str="", ground_truth="", extra_info=None)
    except TypeError as error:
        raise ValueError(
            f"{function} in {path} must take (data_source, solution_str, ground_truth, extra_info=None): {error}"
        ) from error
    return scorer
