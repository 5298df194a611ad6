"""The tables of built-in scorers by data source, and functions that load scorers, built-in ones and the user's.

Scoring processes import this module, so it imports a scorer only when it is asked for.
"""

import inspect
import pkgutil
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from splitppo.config_error import config_errors
from splitppo.user_file import line_in, load_from_file

# The name of the scorer that is the user's function.
CUSTOM = "custom"
# The arguments of a scorer; the function gets them by name. A batched function gets lists, by the plural names.
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = {name: f"{name}s" for name in ARGUMENTS}
# The argument with the characters of each response token, for functions that have it; batched ones get a list of these.
TOKEN_SPANS = "token_spans"  # noqa: S105 - no password
# compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | {"score": float, ...}
ComputeScore = Callable[..., Any | Awaitable[Any]]

# In place of a scoring function: the source of scores that runs programs.
CODE = "rewards.code.source:CodeSandboxes"

# The data sources of each scorer. A name also covers its parts: "math" covers "math/algebra". A name that ends in a
# star covers all names that begin with it.
_DATA_SOURCES: Mapping[str, tuple[str, ...]] = {
    "rewards.scorers.gsm8k:compute_score": ("gsm8k", "openai/gsm8k"),
    "rewards.scorers.gsm8k:compute_flexible_score": ("gsm8k_flexible",),
    "rewards.scorers.competition_math:compute_score": (
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "hendrycks/competition_math",
        "EleutherAI/hendrycks_math",
    ),
    "rewards.scorers.math_dapo:compute_score": ("math_dapo", "math", "math_dapo_reasoning", "aime*"),
    "rewards.scorers.math_dapo:compute_boxed_score": ("math_dapo_boxed",),
    "rewards.scorers.numina:compute_score": (
        "numina_aops_forum",
        "numina_synthetic_math",
        "numina_amc_aime",
        "numina_synthetic_amc",
        "numina_cn_k12",
        "numina_olympiads",
    ),
    "rewards.scorers.exact_match:compute_score": (
        "searchR1_nq",
        "searchR1_triviaqa",
        "searchR1_popqa",
        "searchR1_hotpotqa",
        "searchR1_2wikimultihopqa",
        "searchR1_musique",
        "searchR1_bamboogle",
    ),
    "rewards.scorers.hellaswag:compute_score": ("Rowan/hellaswag",),
    "rewards.scorers.geo3k:compute_score": ("hiyouga/geometry3k",),
    CODE: ("apps", "code", "codecontests", "codeforces", "taco"),
    "rewards.scorers.sort_letters:compute_score": ("sort_letters",),
    "rewards.scorers.read_digits:compute_score": ("read_digits",),
}
# The scorer of each data source, as "module:function".
SCORERS: Mapping[str, str] = {source: place for place, sources in _DATA_SOURCES.items() for source in sources}

_OWN_SCORER = "set reward.custom_function_path to a file with a compute_score function"


def covering(data_source: str, names: Collection[str]) -> str | None:
    """Finds the name in `names` that stands for a data source: its own, or the name of its longest leading part.

    "math" covers "math/algebra", and "aime*" covers all that begin with "aime". Returns None if no name covers the
    source.
    """
    candidate = data_source
    separator = "/"
    while separator:
        if candidate in names:
            return candidate
        if pattern := next((name for name in names if fnmatchcase(candidate, name)), None):
            return pattern
        candidate, separator, _ = candidate.rpartition("/")
    return None


def scorer_name(data_source: str) -> str:
    """Finds the built-in scorer of a data source and returns its key in SCORERS.

    Raises:
        ValueError: no scorer covers the data source; the message names the most similar key, all keys of SCORERS, and
            what to do instead.
    """
    if name := covering(data_source, SCORERS):
        return name
    by_lower_case = {name.lower(): name for name in SCORERS}
    nearest = get_close_matches(data_source.lower(), by_lower_case, n=1)
    hint = f"did you mean {by_lower_case[nearest[0]]!r}? " if nearest else ""
    raise ValueError(
        f"no reward for data_source {data_source!r}; {hint}known: {', '.join(SCORERS)};"
        f" for any other {_OWN_SCORER}, or name its scorers in reward.scorers"
    )


def is_code(name: str) -> bool:
    """Returns True if the scorer of this name runs programs against test cases."""
    return SCORERS.get(name) == CODE


@dataclass(frozen=True)
class Scorer:
    """A scoring function, and its extra arguments; only the user's may be called in another way than built-in ones."""

    function: ComputeScore
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_batched: bool = False  # it takes lists, with the fields of several samples
    takes_token_spans: bool = False  # it takes the spans of the response tokens
    path: Path | None = None  # the user's file; None: it is built in

    def place_of(self, error: BaseException) -> str:
        """Returns " (FILE, line N)": where the user's function raised; where it begins if it returned no score.

        The text is empty for a built-in function.
        """
        if self.path is None:
            return ""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        begins = f", line {code.co_firstlineno}" if code is not None and code.co_filename == str(self.path) else ""
        return f" ({self.path}{line_in(self.path, error) or begins})"

    @property
    def is_async(self) -> bool:
        """True if a call of the scoring function returns an awaitable."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(self.function.__call__)  # type: ignore[operator]


def load_scorer(name: str) -> Scorer:
    """Imports the built-in scoring function of this name, a key of SCORERS, and returns it as a `Scorer`."""
    return Scorer(pkgutil.resolve_name(SCORERS[name]))


def load_custom_scorer(path: Path, name: str, kwargs: Mapping[str, Any]) -> Scorer:
    """Imports the user's file, checks the parameters of the scoring function, and returns it as a `Scorer`.

    The function is batched if it has a parameter `solution_strs`.

    Raises:
        ConfigError: the file cannot be imported or has no function of this name; or the function does not take the
            arguments of a scorer, or those in `kwargs`.
    """
    function: ComputeScore = load_from_file(
        path, name, path_key="reward.custom_function_path", name_key="reward.custom_function_name"
    )
    with config_errors(ValueError, before=f"{name} in {path}: "):
        signature = inspect.signature(function)
    is_batched = BATCH_ARGUMENTS["solution_str"] in signature.parameters
    takes_token_spans = TOKEN_SPANS in signature.parameters
    arguments = tuple(BATCH_ARGUMENTS.values()) if is_batched else ARGUMENTS
    with config_errors(TypeError, before=f"{name} in {path} must take ({', '.join(arguments)}=None): "):
        signature.bind_partial(**dict.fromkeys(arguments))
    if takes_token_spans:
        arguments = (*arguments, TOKEN_SPANS)
    problem = f"key 'reward.custom_function_kwargs': {name}{signature} in {path}: "
    with config_errors(TypeError, before=problem):
        signature.bind(**dict.fromkeys(arguments), **kwargs)
    return Scorer(function, kwargs, is_batched, takes_token_spans, path)
