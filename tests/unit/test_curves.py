"""`benchmarks.curves`: what a table of critics says of runs, from the files that runs leave."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.curves import (
    CRITICS,
    EXPLAINED,
    HALF,
    METRIC,
    PICTURES,
    TOKENS,
    Algorithm,
    columns_of_critics,
    curves_of,
    table_of,
)
from splitppo.run_folder.step_file import METRICS_FILE

PLAIN = Algorithm("plain", ("a=1",))
NONE = Algorithm("none", ("b=2",))


def put_run(output: Path, algorithm: Algorithm, seed: int, rows: Sequence[Mapping[str, float | None]]) -> None:
    folder = output / algorithm.name / f"seed_{seed}"
    folder.mkdir(parents=True)
    folder.with_name(f"{folder.name}.json").write_text(json.dumps([*algorithm.overrides, f"run.seed={seed}"]))
    (folder / "summary.json").write_text(json.dumps({"exit_reason": "completed"}))
    lines = [json.dumps({"step": step, **row}) for step, row in enumerate(rows)]
    (folder / METRICS_FILE).write_text("".join(f"{line}\n" for line in lines))


def steps(accuracy: Sequence[float | None], explained: Sequence[float | None]) -> list[dict[str, float | None]]:
    """The validation before the first step, and steps of 1,000 tokens each."""
    of_steps = zip(accuracy[1:], explained, strict=True)
    return [{METRIC: accuracy[0]}, *({METRIC: score, EXPLAINED: ev, TOKENS: 1000.0} for score, ev in of_steps)]


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_a_table_of_critics_has_explained_variance_steps_and_tokens_to_the_goal(tmp_path: Path) -> None:
    put_run(tmp_path, PLAIN, 1, steps([0.1, 0.5, 0.8, 0.95, 0.7], [-1.0, 9.0, 0.2, 0.4]))
    put_run(tmp_path, PLAIN, 2, steps([0.1, 0.9, 0.8, 0.95, 0.9], [-1.0, 9.0, 0.5, 0.5]))
    put_run(tmp_path, PLAIN, 3, steps([0.1, 0.2, 0.3, 0.4, 0.5], [-1.0, 9.0, 0.0, 0.0]))
    put_run(tmp_path, NONE, 1, steps([0.1, 0.2, None, 0.85, 0.9], [None] * 4))
    _, _, plain, none = table_of([PLAIN, NONE], tmp_path, columns_of_critics(0.9))
    assert cells(plain) == [
        *("plain", "0.30, 0.50, 0.00", "3, 1, not reached", "3", "3,000"),
        *("0.700, 0.900, 0.500", "`a=1`"),
    ]
    assert cells(none) == ["none", "", "4", "4", "4,000", "0.900", "`b=2`"]


def test_a_line_that_was_not_run_or_was_refused_says_so(tmp_path: Path) -> None:
    put_run(tmp_path, PLAIN, 1, steps([0.1, 0.2], [0.1]))
    (tmp_path / "plain" / "seed_1.refused").write_text("key 'a': unknown")
    _, _, plain, none = table_of([PLAIN, NONE], tmp_path, columns_of_critics(0.9))
    assert cells(plain)[:2] == ["plain", "key 'a': unknown"]
    assert cells(none)[:2] == ["none", "not run"]


def test_runs_with_other_settings_are_not_counted(tmp_path: Path) -> None:
    put_run(tmp_path, Algorithm("plain", ("a=3",)), 1, steps([0.1, 0.2], [0.1]))
    assert curves_of(PLAIN, tmp_path) == {}


@pytest.mark.parametrize("picture", CRITICS)
def test_each_picture_of_critics_has_four_critics_and_none_on_one_task(picture: str) -> None:
    plain, privileged, frozen, smaller, none = PICTURES[picture]
    assert len({line.recipe.config_file for line in PICTURES[picture]}) == 1
    for line, key in ((privileged, "privileged_prompt"), (frozen, "freeze"), (smaller, "model")):
        assert line.changes[: len(plain.changes)] == plain.changes
        first, *others = line.changes[len(plain.changes) :]
        assert first.startswith(f"critic.{key}=")
        assert all(change.startswith("critic.") for change in others)
    assert "algorithm.adv_estimator=grpo" in none.changes


def test_a_model_of_half_the_width_has_a_folder_of_its_own_beside_the_recipes_files() -> None:
    assert str(HALF.output) == ".cache/sort_letters_half"
    assert HALF.whole.output == Path(".cache/sort_letters")
