"""The comparison of groups of samples, and the groups whose samples are alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from controller.conversations.conversation import Conversation
from controller.ppo.scores import Scores, objects
from controller.sampling.keep import Groups, KeptGroups, TooFewSampleGroups, metric_values
from rewards.samples import Failure
from splitppo.batch import Batch
from splitppo.config import ConfigError
from splitppo.config.subsections.filter_groups import FilterGroupsConfig
from tests.support.fake_services import make_table
from tests.support.scores import make_scores


def scored(*scores: float, extra: list[dict[str, Any]] | None = None, failure: Failure | None = None) -> Scores:
    return make_scores(
        np.array(scores, np.float32),
        extra=objects(extra or [{}] * len(scores)),
        failures=objects([failure] * len(scores)),
        data_sources=objects(["sums"] * len(scores)),
    )


def groups(num_prompts: int = 1, epoch: int = 9, **config: Any) -> KeptGroups:
    return KeptGroups(FilterGroupsConfig(enable=True, **config), num_prompts, 5, rounds_per_epoch=epoch)


def add(kept: KeptGroups, scores: Scores, num_prompts: int) -> None:
    rows = Batch.from_rows(responses=[[row] for row in range(scores.num_rows)])
    kept.add(Groups(make_table(num_prompts), rows, scores))


@pytest.mark.parametrize("metric", ["score", "seq_reward", "seq_final_reward"])
def test_the_names_of_the_score_mean_the_score(metric: str) -> None:
    assert metric_values(scored(0.5, -1.0, extra=[{"acc": 1}] * 2), metric).tolist() == [0.5, -1.0]


def test_a_field_of_the_scorer_is_taken_as_a_number() -> None:
    extra = [{"acc": True}, {"acc": False}, {"acc": 0.25}]
    assert metric_values(scored(9.0, 9.0, 9.0, extra=extra), "acc").tolist() == [1.0, 0.0, 0.25]


def test_a_plain_number_is_its_own_acc_and_a_failed_scorer_counts_as_0() -> None:
    assert metric_values(scored(0.5, 1.0), "acc").tolist() == [0.5, 1.0]
    assert metric_values(scored(0.0, failure=Failure.TIMEOUT), "steps").tolist() == [0.0]
    lost = replace(scored(0.0), conversations=objects([Conversation(lost="it broke")]))
    assert metric_values(lost, "steps").tolist() == [0.0]


@pytest.mark.parametrize("value", [{}, {"steps": "many"}])
def test_a_field_that_is_no_number_is_refused_with_those_that_are(value: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"'sums' gives no numeric field 'steps'; expected one of score, .*, length$"):
        metric_values(scored(0.5, extra=[{**value, "length": 3, "text": "x"}]), "steps")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_a_field_that_is_not_finite_or_too_large_is_refused(value: float) -> None:
    """NaN is equal to nothing, itself included, and a group of it would be kept."""
    with pytest.raises(ConfigError) as raised:
        metric_values(scored(0.5, extra=[{"steps": value}]), "steps")
    told = f"'sums' gives {value} in the field 'steps'; expected a finite number of at most 1e+12"
    assert str(raised.value).endswith(told)


@pytest.mark.parametrize("value", [0.1, 1.1, -1e30, 1 / 3])
def test_equal_numbers_are_alike_whatever_their_deviation_is_rounded_to(value: float) -> None:
    kept, next_to_it = groups(), float(np.nextafter(np.float32(value), np.float32(9)))
    add(kept, scored(*[value] * 3, *[value, value, next_to_it]), num_prompts=2)
    assert kept.metrics()["training/filter_groups/evicted_samples"] == 1.0
    assert kept.is_full


def test_a_barren_stretch_ends_the_run_only_where_it_is_a_whole_epoch_long() -> None:
    kept = groups(num_prompts=2, epoch=2)
    for responses in (scored(0, 0), scored(0, 1), scored(1, 1), scored(0.5, 0.5)):
        kept.check()
        add(kept, responses, num_prompts=1)
    with pytest.raises(
        TooFewSampleGroups, match=r"it has 1 of 2 .* \(all at 0: 1, all at 1: 1, all at 0.5: 1\); take other"
    ):
        kept.check()


def test_many_values_are_not_all_named() -> None:
    kept = groups(max_num_gen_batches=1)
    add(kept, scored(*np.repeat([1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2)), num_prompts=7)
    with pytest.raises(
        TooFewSampleGroups, match=r"\(all at 1: 2, all at 2: 1, all at 3: 1, all at 4: 1, at 2 other values: 2"
    ):
        kept.check()
