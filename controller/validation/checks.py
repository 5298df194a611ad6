"""Checks, before a run starts, that validation can give what the configuration asks of it."""

import logging
import re

import numpy as np

from controller.data.prompts import PromptBatch
from rewards.terms import scored_sources
from splitppo.config import Config, ConfigError, RewardConfig

log = logging.getLogger(__name__)


def check_validation_metrics(config: Config, data_sources: frozenset[str]) -> None:
    """Checks that validation will compute the metrics that the configuration names, as far as is known before the run.

    Raises:
        ConfigError: nothing is validated, or no validation prompt has the data source of the metric, or a prompt has
            fewer responses than the metric needs.
    """
    named = {
        "evaluation.early_stop.metric": config.evaluation.early_stop.metric,
        "checkpoint.best_metric": config.checkpoint.best_metric,
    }
    if config.evaluation.val_only and not data_sources:
        raise ConfigError("evaluation.val_only: no validation prompt has a reward function")
    for key, metric in ((key, metric) for key, metric in named.items() if metric is not None):
        sources = ", ".join(sorted(data_sources)) or "none"
        sections = [f"{section}/{source}/" for section in ("val-core", "val-aux") for source in data_sources]
        if metric != "val/accuracy" and not metric.startswith(tuple(sections)):
            raise ConfigError(f"{key}: no validation prompt has the data_source of {metric!r}; they have {sources}")
        if not data_sources:
            raise ConfigError(f"{key}: nothing is validated, no validation prompt has a reward function")
        number = re.search(r"@(\d+)(/|$)", metric)
        if number and int(number[1]) > config.evaluation.n:
            raise ConfigError(
                f"{key}: {metric!r} needs {number[1]} responses, but evaluation.n is {config.evaluation.n}"
            )


def with_functions(val_prompts: PromptBatch, config: RewardConfig) -> PromptBatch | None:
    """Returns the validation prompts whose data source has a reward function; None if there is no such prompt.

    The others cannot be scored, because neither a reward model nor a teacher is used in validation.
    """
    judged = scored_sources(config, val_prompts.data_sources)
    if without := sorted(val_prompts.data_sources - judged):
        log.warning(
            "only reward functions validate, and data_source %s has none: its validation prompts are left out",
            ", ".join(without),
        )
    places = np.flatnonzero([row.data_source in judged for row in val_prompts.rows])
    return val_prompts.take(places) if len(places) else None
