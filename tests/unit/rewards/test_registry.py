"""The scorer of each data source, and the errors that users see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rewards.registry import SCORERS, is_code, load_scorer, scorer_name
from rewards.scorers.sort_letters import compute_score
from rewards.terms import check_scorers
from splitppo.config import ConfigError, RewardConfig


@pytest.mark.promise("scorers")
def test_every_registered_scorer_can_be_loaded() -> None:
    assert all(callable(load_scorer(name).function) for name in SCORERS)


@pytest.mark.parametrize(
    ("data_source", "name"),
    [
        ("openai/gsm8k", "openai/gsm8k"),
        ("openai/gsm8k/main", "openai/gsm8k"),
        ("math/algebra/hard", "math"),
        ("aime2024", "aime*"),
        ("aime_2025/part_1", "aime*"),
    ],
)
def test_a_name_covers_its_parts(data_source: str, name: str) -> None:
    assert scorer_name(data_source) == name


@pytest.mark.parametrize("data_source", ["mathematics", "openai", "", "my/math", "AIME2024"])
def test_an_unknown_data_source_is_a_config_error_that_says_what_to_do(data_source: str) -> None:
    keys = r"known: gsm8k, .*aime\*.*reward\.custom_function_path"
    with pytest.raises(ConfigError, match=rf"no reward for data_source '{data_source}'.*{keys}"):
        check_scorers(RewardConfig.model_validate({}), ["math", data_source])


@pytest.mark.parametrize(
    ("data_source", "nearest"),
    [
        ("openai/gsm8", "openai/gsm8k"),
        ("GSM8K", "gsm8k"),
        ("lighteval/math", "lighteval/MATH"),
        ("mathdapo", "math_dapo"),
    ],
)
def test_the_nearest_known_data_source_is_named(data_source: str, nearest: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"no reward for data_source '{data_source}'; did you mean '{nearest}'\? known"
    ):
        check_scorers(RewardConfig.model_validate({}), [data_source])


def test_the_page_on_verl_names_every_data_source() -> None:
    page = (Path(__file__).parents[3] / "docs" / "scorers.md").read_text(encoding="utf-8")
    assert [source for source in SCORERS if f"`{source}`" not in page] == []


@pytest.mark.promise("your own reward")
def test_a_users_function_judges_any_data_source(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.touch()
    check_scorers(RewardConfig.model_validate({"custom_function_path": path}), ["anything"])


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    config = RewardConfig.model_validate({"custom_function_path": tmp_path / "mine.py"})
    with pytest.raises(ConfigError, match=r"'reward\.custom_function_path': there is no file .*mine\.py"):
        check_scorers(config, ["anything"])


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("#### abcd", 1.0),
        ("####abcd\n", 1.0),
        ("#### dcba #### abcd", 1.0),
        ("#### abcd #### dcba", 0.0),
        ("#### abcde", 0.0),
        ("abcd", 0.0),
        ("####", 0.0),
        ("", 0.0),
    ],
)
def test_sort_letters_wants_the_sorted_letters_behind_the_last_marker(response: str, score: float) -> None:
    assert compute_score("sort_letters", response, "abcd") == score


def test_a_scoring_process_imports_neither_the_controller_nor_anything_heavy() -> None:
    code = "import sys, rewards.scoring_process; print(*sys.modules)"
    root = Path(__file__).parents[3]
    modules = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    imported = set(modules.stdout.split())
    assert not {"numpy", "torch", "grpc", "pydantic", "math_verify", "controller"} & imported
    ours = {name.removeprefix("splitppo.") for name in imported if name.startswith("splitppo.")}
    assert ours == {"config_error", "user_file", "machine", "machine.children", "machine.children.parent"}


@pytest.mark.parametrize("answer", [r"\boxed{None}", "#### None", "Answer: None", "None", "nan"])
def test_no_answer_is_right_where_there_is_no_ground_truth(answer: str) -> None:
    for name in SCORERS:
        if is_code(name) or name.startswith("searchR1") or name == "Rowan/hellaswag":  # these raise
            continue
        scored = load_scorer(name).function(name, answer, None)
        assert (scored["score"] if isinstance(scored, dict) else scored) <= 0.0
