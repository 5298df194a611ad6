"""Real GSM8K rows through the recipe for two CPU cores, killed on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.gsm8k import prepare
from tests.groups import PROJECT
from tests.runs import started

SOURCE = PROJECT.parent / "shared" / "data" / "gsm8k"
RECIPE = PROJECT / "recipes" / "gsm8k" / "cpu.yaml"
KILLED_IN, NUM_STEPS = 3, 4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extended,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not SOURCE.is_dir(), reason="needs GSM8K's train.jsonl and test.jsonl in ../shared/data/gsm8k"),
]


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    """The recipe as it is, but for where its files lie."""
    prepared = tmp_path / "prepared"
    assert prepare.main(["--input", str(SOURCE), "--output", str(prepared)]) == 0
    tree: dict[str, Any] = yaml.safe_load(RECIPE.read_text().replace(".cache/gsm8k/", f"{prepared}/"))
    return tree


def test_a_run_killed_in_step_3_ends_with_the_weights_of_an_undisturbed_one(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    with started(recipe, tmp_path / "undisturbed") as controller:
        undisturbed = controller.complete()
    kill = {"failpoints": {"controller.actor.update": {"step": KILLED_IN}}}
    with started({**recipe, "debug": kill}, tmp_path / "run") as first:
        assert first.wait() == -9, first.output
        first.wait_nothing_is_left()
    assert first.folder.steps == list(range(KILLED_IN))
    with started(recipe, tmp_path / "run") as second:
        folder = second.complete()
    assert f"resumed after step {KILLED_IN - 1}" in second.output
    assert folder.steps == list(range(NUM_STEPS + 1))
    assert folder.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
    assert None not in folder.summary["weights_sha256"].values()
