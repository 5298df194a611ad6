"""Checks, before a run starts, that its rows can be scored, and tries the user's reward functions on some of them."""

from collections.abc import Iterable, Set

import numpy as np

from controller.conversations.conversation import Conversation
from controller.data.prompt_files import PromptRow
from controller.data.prompts import PromptBatch
from controller.data.row_values import is_missing
from controller.data.tokenizer import Tokenizer
from controller.scoring.scorer import Scorer
from rewards.code.cases import parse_cases
from rewards.manager import RewardManager
from rewards.samples import Sample
from rewards.terms import check_scorers, numeric_fields, runs_code, terms_of, uses_built_in
from splitppo.batch import Batch
from splitppo.config import Config, ConfigError, RewardConfig
from splitppo.config.subsections.filter_groups import SCORE_METRICS
from splitppo.config_error import config_errors

_NO_REWARD_OF_PROGRAM = (
    "a program without reward gives none: set reward: output beside command, and have it print a JSON object with score"
    " as its last line, or reward: endpoint, or give its data_source a scorer"
)
_MAX_TRUTH = 10_000  # characters of a ground truth that is scored as a trial


def check_scoring(config: Config, rows: Iterable[PromptRow], *, trained: Set[str], scored: Set[str]) -> None:
    """Checks that reward functions can score the rows of their data sources.

    Args:
        config: the configuration of the run.
        rows: those of all prompts.
        trained: the data sources of the training prompts.
        scored: the data sources that reward functions score.

    Raises:
        ConfigError: a data source with nothing but tools or a program has no reward, a scorer cannot be used, dynamic
            sampling compares what no scorer gives, or a row lacks its ground truth.
    """
    multi_turn = config.rollout.multi_turn
    for source in sorted(scored):
        own = multi_turn.environment_of(source)
        if own is not None and not own.gives_rewards:
            what = "tools alone give no reward" if own.tools else _NO_REWARD_OF_PROGRAM
            with config_errors(ValueError, before=f"{what}: "):
                terms_of(config.reward, source)
    check_scorers(config.reward, scored)
    if not multi_turn.environments:
        _check_filter_metric(config, trained & scored)
    _check_ground_truths(config.reward, [row for row in rows if row.data_source in scored])


def _check_filter_metric(config: Config, data_sources: Iterable[str]) -> None:
    """Checks that built-in scorers give the metric by which dynamic sampling compares samples; ConfigError if not.

    What a user's reward function or environment returns is known only when the run calls it.
    """
    filters = config.algorithm.filter_groups
    for source in sorted(data_sources) if filters.enable and not filters.compares_scores else ():
        fields = numeric_fields(config.reward, source)
        if fields is not None and filters.metric not in fields:
            raise ConfigError(
                f"algorithm.filter_groups.metric: the scorer of data_source {source!r} gives no numeric field"
                f" {filters.metric!r}; expected one of {', '.join((*SCORE_METRICS, *fields))}"
            )


def _check_ground_truths(config: RewardConfig, rows: Iterable[PromptRow]) -> None:
    """Checks that every prompt row has the ground truth that a built-in scorer needs; ConfigError if one has none.

    Rows whose answers are run as programs need test cases. What a user's function needs, only the function knows.
    """
    for row in rows:
        if is_missing(row.ground_truth) and uses_built_in(config, row.data_source):
            raise ConfigError(
                f"{row.place}: column 'reward_model' has no 'ground_truth', which the scorer of data_source"
                f" {row.data_source!r} compares responses with"
            )
        if runs_code(config, row.data_source):
            with config_errors(ValueError, before=f"{row.place}: reward_model.ground_truth: "):
                parse_cases(row.ground_truth)


async def try_reward_functions(
    config: Config, tokenizer: Tokenizer, prompts: PromptBatch, data_sources: Set[str]
) -> str:
    """Starts and ends all that scores once, as a trial; has functions score a row of each data source.

    No judge is asked and no program run. The response is the ground truth of the row. Returns a line with the scores.
    `data_sources` are those that reward functions score.

    Raises:
        ConfigError: a user's function cannot be loaded, or gives no score; `reward.max_error_rate` 1 allows the latter.
    """
    scores: list[str] = []
    async with RewardManager(config.reward, data_sources) as manager:
        first_row_of: dict[str, int] = {}
        for index, row in enumerate(prompts.rows):
            first_row_of.setdefault(row.data_source, index)
        places = [index for source, index in sorted(first_row_of.items()) if source in manager.data_sources]
        tried = prompts.take(np.array(places, np.int64))
        samples = _trial_samples(Scorer(tokenizer, manager), tried, config)
        for row, result in zip(tried.rows, await manager.try_functions(samples), strict=True):
            if result is None:
                continue
            if result.failure is None:
                scores.append(f"{row.data_source} {result.total:g}")
            elif config.reward.max_error_rate < 1:
                raise ConfigError(
                    f"{row.place}, data_source {row.data_source!r}: its ground truth as the response gets no score:"
                    f" {result.message}"
                )
    remark = "0 or less where more than the ground truth is expected, such as a box"
    return f"scores of a ground truth as the response ({remark}): {', '.join(scores)}\n" if scores else ""


def _trial_samples(scorer: Scorer, prompts: PromptBatch, config: Config) -> list[Sample]:
    """Makes a sample for each prompt: its ground truth as the response, in a conversation if there are environments.

    The response has ended by itself, as a whole answer does.
    """
    truths = ["" if row.ground_truth is None else str(row.ground_truth)[:_MAX_TRUTH] for row in prompts.rows]
    encode = scorer.tokenizer.backend.encode
    end = scorer.tokenizer.eos_token_ids[:1]
    responses = [[*encode(truth, add_special_tokens=False).ids, *end] for truth in truths]
    conversations = [
        Conversation(
            turn_rewards=(0.0,),
            turn_ends=(max(0, len(ids) - 1),),
            messages=({"role": "assistant", "content": truth},),
            last_turn=truth,
        )
        for truth, ids in zip(truths, responses, strict=True)
        if config.rollout.multi_turn.environments
    ]
    return scorer.samples(prompts, Batch.from_rows(responses=responses), conversations)
