"""Finds the scorers whose weighted sum is the score of a data source, and checks that they can be used."""

from collections.abc import Iterable
from contextlib import suppress

from rewards.judge.questions import Questions, headers
from rewards.registry import CUSTOM, SCORERS, covering, is_code, scorer_name
from splitppo.config import ConfigError, RewardConfig
from splitppo.config.sections.reward import Term
from splitppo.config_error import config_errors, did_you_mean

JUDGE = "judge"
# The entry of `reward.scorers` for all data sources that it does not name.
DEFAULT = "default"


def terms_of(config: RewardConfig, data_source: str) -> tuple[Term, ...]:
    """Finds the scorers of a data source, with their weights: from `reward.scorers`, the user's function, or built-in.

    The first of these three that has scorers for the data source counts. In `reward.scorers` a name also covers its
    parts, as in `registry.covering`. Raises ValueError if the data source has no scorer.
    """
    if (name := covering(data_source, config.scorers)) is not None:
        return config.scorers[name]
    if DEFAULT in config.scorers:
        return config.scorers[DEFAULT]
    return (Term(name=scorer_name(data_source) if config.custom_function_path is None else CUSTOM),)


def check_scorers(config: RewardConfig, data_sources: Iterable[str]) -> None:
    """Checks that every data source has a scorer, and that the scorers have the files, URL and API key they need.

    Raises:
        ConfigError: a data source has no scorer (the message says what to do); `reward.scorers` names an unknown
            scorer; or the user's file, the judge's URL, its template or its API key is missing.
    """
    if (path := config.custom_function_path) is not None and not path.is_file():
        raise ConfigError(f"key 'reward.custom_function_path': there is no file {path}")
    for place, terms in config.scorers.items():
        for term in terms:
            _check_name(term.name, f"key 'reward.scorers': {place} asks for", config)
    with config_errors(ValueError):
        names = {term.name for data_source in sorted(data_sources) for term in terms_of(config, data_source)}
    if JUDGE in names:
        Questions(config.judge)
        headers(config.judge)


def scored_sources(config: RewardConfig, data_sources: Iterable[str]) -> frozenset[str]:
    """Returns those of the given data sources that have a scorer."""
    scored = set()
    for data_source in data_sources:
        with suppress(ValueError):
            terms_of(config, data_source)
            scored.add(data_source)
    return frozenset(scored)


def runs_code(config: RewardConfig, data_source: str) -> bool:
    """Returns True if a scorer of this data source runs programs against test cases."""
    return any(is_code(term.name) for term in terms_of(config, data_source))


def uses_built_in(config: RewardConfig, data_source: str) -> bool:
    """Returns True if a built-in scorer, which compares with the ground truth, scores this data source."""
    return any(term.name in SCORERS for term in terms_of(config, data_source))


def needs_ground_truth(config: RewardConfig, data_source: str) -> bool:
    """Returns True if a function, built-in or the user's, scores this data source; a judge needs no ground truth."""
    return data_source in scored_sources(config, [data_source]) and any(
        term.name != JUDGE for term in terms_of(config, data_source)
    )


def numeric_fields(config: RewardConfig, data_source: str) -> tuple[str, ...] | None:
    """Returns the names of the numeric fields in results for a data source; None if the user's function chooses them.

    The field `acc` is always among the names.
    """
    terms = terms_of(config, data_source)
    if any(term.name == CUSTOM for term in terms):
        return None
    parts = [f"{term.name}_score" for term in terms if len(terms) > 1 or term.weight != 1.0]
    return ("acc", *parts)


def _check_name(name: str, asks: str, config: RewardConfig) -> None:
    """Checks that a scorer exists and is set up; ConfigError begins with `asks`, which says who asks for it."""
    scorers = (*SCORERS, CUSTOM, JUDGE)
    if name not in scorers:
        hint = did_you_mean(name, scorers) or f"; known: {', '.join(scorers)}"
        raise ConfigError(f"{asks} {name!r}, which is no scorer{hint}")
    if name == CUSTOM and config.custom_function_path is None:
        raise ConfigError(f"{asks} {CUSTOM!r}, but reward.custom_function_path is not set")
    if name == JUDGE and not config.judge.url:
        raise ConfigError(f"{asks} {JUDGE!r}, but reward.judge.url is not set")
