"""What scores the rows of a run: every mistake is one sentence, before the run starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from controller.preflight import load_inputs
from splitppo.config import ConfigError
from tests.support.model_folders import write_model, write_rows

FILTERED = {"rollout__n": 2, "algorithm__filter_groups__enable": True}


def write_row(file: Path, data_source: str, **reward_model: Any) -> str:
    file.write_text(json.dumps({"prompt": "abc", "data_source": data_source, "reward_model": reward_model}) + "\n")
    return str(file)


def test_a_data_source_without_a_reward_is_named(tmp_path: Path, make: Any) -> None:
    train = write_rows(tmp_path / "odd.jsonl", "sort_letters", "riddles")
    with pytest.raises(ConfigError, match="riddles"):
        load_inputs(make(data__train_files=train))


def test_a_row_of_a_code_set_without_test_cases_is_named(tmp_path: Path, make: Any) -> None:
    train = write_rows(tmp_path / "odd.jsonl", "sort_letters", "apps")
    with pytest.raises(
        ConfigError, match=r"odd\.jsonl, line 2: reward_model\.ground_truth: expected JSON .*, got 'c'$"
    ):
        load_inputs(make(data__train_files=train))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "score, seq_reward, seq_final_reward, acc"),
        (
            {"reward__scorers": {"default": [{"name": "gsm8k"}, {"name": "math", "weight": 0.5}]}},
            "score, seq_reward, seq_final_reward, acc, gsm8k_score, math_score",
        ),
    ],
)
def test_a_filter_metric_that_built_in_scorers_do_not_give_is_refused(
    make: Any, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_inputs(make(algorithm__filter_groups__metric="nonsense", **FILTERED, **changes))
    assert str(refused.value) == (
        "algorithm.filter_groups.metric: the scorer of data_source 'sort_letters' gives no numeric field 'nonsense';"
        f" expected one of {expected}"
    )
    for metric in expected.split(", "):
        load_inputs(make(algorithm__filter_groups__metric=metric, **FILTERED, **changes))
    load_inputs(make(algorithm__filter_groups__metric="nonsense"))  # without dynamic sampling nobody reads it


def test_a_filter_metric_may_be_any_field_of_a_users_function(tmp_path: Path, make: Any) -> None:
    (tmp_path / "own.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...")
    own = {"reward__custom_function_path": str(tmp_path / "own.py")}
    load_inputs(make(algorithm__filter_groups__metric="nonsense", **FILTERED, **own))


def test_a_row_without_a_ground_truth_is_refused_where_a_function_scores_it(tmp_path: Path, make: Any) -> None:
    own = tmp_path / "own.py"
    own.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...")
    null = write_row(tmp_path / "null.jsonl", "sort_letters", ground_truth=None)
    of_model = write_row(tmp_path / "model.jsonl", "sort_letters", style="model", ground_truth=None)
    one = {"data__train_batch_size": 1, "actor__ppo_mini_batch_size": 1, "critic__ppo_mini_batch_size": 1}
    for changes in ({}, {"reward__custom_function_path": str(own)}):
        with pytest.raises(ConfigError, match=r"null\.jsonl, line 1: column 'reward_model' has no 'ground_truth'"):
            load_inputs(make(data__train_files=null, **one, **changes))
    with pytest.raises(ConfigError, match=r"model\.jsonl, line 1: .* which the scorer of data_source 'sort_letters'"):
        load_inputs(make(data__train_files=of_model, **one))
    load_inputs(make(data__train_files=of_model, **one, reward__custom_function_path=str(own)))


def test_a_judge_and_a_reward_model_need_no_ground_truth(tmp_path: Path, make: Any) -> None:
    null = write_row(tmp_path / "null.jsonl", "hh", ground_truth=None)
    one = {"data__train_batch_size": 1, "actor__ppo_mini_batch_size": 1, "critic__ppo_mini_batch_size": 1}
    judge = {
        "reward__scorers": {"hh": [{"name": "judge"}]},
        "reward__judge": {"url": "http://localhost:1/v1", "model": "m"},
    }
    model = {"reward_model__model": write_model(tmp_path / "rm", num_labels=1)}
    for changes in (judge, model):
        inputs = load_inputs(make(data__train_files=null, **one, **changes))
        assert inputs.prompts.table.rows[0].ground_truth is None


def test_a_missing_reward_file_is_named(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"reward\.custom_function_path.*mine\.py"):
        load_inputs(make(reward__custom_function_path="mine.py"))
