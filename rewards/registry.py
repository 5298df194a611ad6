"""Which scorer judges which data source, and a user's scorer from a file.

Imported by the scoring processes, so it stays light: scorers are imported when they are first asked for.
"""

import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

# compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | {"score": float, ...}
ComputeScore = Callable[..., Any | Awaitable[Any]]

# The scorer's name where a user's function scores.
CUSTOM = "custom"

# The data sources of each scorer. A name also covers its parts ("math" is asked for "math/algebra" too), and one that
# ends in a star what begins with it.
_DATA_SOURCES: Mapping[str, tuple[str, ...]] = {
    "rewards.gsm8k:compute_score": ("openai/gsm8k", "gsm8k"),
    "rewards.gsm8k:compute_flexible_score": ("gsm8k_flexible",),
    "rewards.competition_math:compute_score": (
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "hendrycks/competition_math",
        "EleutherAI/hendrycks_math",
    ),
    "rewards.math_dapo:compute_score": ("math_dapo", "math", "math_dapo_reasoning", "aime*"),
    "rewards.numina:compute_score": (
        "numina_aops_forum",
        "numina_synthetic_math",
        "numina_amc_aime",
        "numina_synthetic_amc",
        "numina_cn_k12",
        "numina_olympiads",
    ),
    "rewards.exact_match:compute_score": (
        "searchR1_nq",
        "searchR1_triviaqa",
        "searchR1_popqa",
        "searchR1_hotpotqa",
        "searchR1_2wikimultihopqa",
        "searchR1_musique",
        "searchR1_bamboogle",
    ),
    "rewards.sort_letters:compute_score": ("sort_letters",),
}
# The scorer's place by data source.
SCORERS: Mapping[str, str] = {source: place for place, sources in _DATA_SOURCES.items() for source in sources}

_OWN_SCORER = "set reward.custom_function_path to a file with a compute_score function"
# What verl scores and nothing here does: why, and what to do instead.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("apps", "codecontests", "codeforces", "taco"),
        f"its responses are programs, which no built-in function runs; {_OWN_SCORER} that runs them",
    ),
    "hiyouga/geometry3k": "its problems are images, and models are trained on text alone here;"
    f" where they have been put into words, {_OWN_SCORER}",
}


def scorer_name(data_source: str) -> str:
    """The key of SCORERS that covers a data source.

    Raises:
        ValueError: none does; the message says what to do instead, and the known ones with the nearest.
    """
    if name := _covering(data_source, SCORERS):
        return name
    if name := _covering(data_source, REFUSED):
        raise ValueError(f"no reward for data_source {data_source!r}: {REFUSED[name]}")
    by_lower_case = {name.lower(): name for name in SCORERS}
    nearest = get_close_matches(data_source.lower(), by_lower_case, n=1)
    hint = f"did you mean {by_lower_case[nearest[0]]!r}? " if nearest else ""
    raise ValueError(
        f"no reward for data_source {data_source!r}; {hint}known: {', '.join(SCORERS)}; for any other {_OWN_SCORER}"
    )


def _covering(data_source: str, names: Iterable[str]) -> str | None:
    """The name that is `data_source`, or one of its parents, or a pattern of either."""
    candidate, separator = data_source, "/"
    while separator:
        if name := next((name for name in names if fnmatchcase(candidate, name)), None):
            return name
        candidate, separator, _ = candidate.rpartition("/")
    return None


def has_scorer(data_source: str) -> bool:
    """Whether a built-in scorer covers a data source."""
    return _covering(data_source, SCORERS) is not None


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
