"""Real rows of each recipe's data set, in its configuration for two CPU cores, with a kill in between."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.datasets import real_rows
from tests.support.external import external_groups
from tests.support.groups import PROJECT
from tests.support.runs import RunFolder, started

KILLED_IN, NUM_STEPS = 3, 4
RECIPES = [
    "gsm8k",
    *(pytest.param(name, marks=pytest.mark.extended) for name in ("hh_rlhf", "competition_math", "hellaswag")),
]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def config_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """A recipe as it is, but for where its files lie: prepared here, of real rows."""

    @functools.cache
    def prepared(recipe: str) -> dict[str, Any]:
        output = tmp_path_factory.mktemp(recipe)
        arguments = [*real_rows(recipe), "--output", str(output)]
        more = ["--split", "rl"] if recipe == "hh_rlhf" else []
        assert importlib.import_module(f"recipes.{recipe}.prepare").main([*arguments, *more]) == 0
        text = (PROJECT / "recipes" / recipe / "cpu.yaml").read_text()
        tree: dict[str, Any] = yaml.safe_load(text.replace(f".cache/{recipe}/", f"{output}/"))
        return tree

    return prepared


@pytest.fixture(scope="module")
def killed_and_resumed(
    config_of: Callable[[str], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], RunFolder]:
    """The run of a recipe whose controller was killed in step 3, and started again; both groups stay."""

    @functools.cache
    def complete(recipe: str) -> RunFolder:
        kill = {"failpoints": {"controller.actor.update": {"step": KILLED_IN}}}
        with external_groups(config_of(recipe), tmp_path_factory.mktemp("runs") / recipe) as groups:
            with started({**groups.config, "debug": kill}, groups.folder.path) as first:
                assert first.wait() == -9, first.output
            newest = groups.folder.committed_steps[-1]  # that of the step before is written in the background
            assert newest in (KILLED_IN - 2, KILLED_IN - 1)
            with groups.started() as second:
                second.complete()
        assert f"resumed after step {newest}" in second.output
        return groups.folder

    return complete


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_killed_in_step_3_completes_with_every_step_once(
    killed_and_resumed: Callable[[str], RunFolder], config_of: Callable[[str], dict[str, Any]], recipe: str
) -> None:
    folder = killed_and_resumed(recipe)
    is_validated = "val_files" in config_of(recipe)["data"]  # before the first step, too
    assert folder.steps == list(range(0 if is_validated else 1, NUM_STEPS + 1))
    assert folder.committed_steps == list(range(1, NUM_STEPS + 1))
    assert None not in folder.summary["weights_sha256"].values()
    last = folder.metrics[-1]
    assert ("reward/model/mean" in last) is (recipe == "hh_rlhf")
    assert last["critic/grad_norm"] > 0


@pytest.mark.extended
@pytest.mark.parametrize("recipe", ["gsm8k", "hh_rlhf"])
def test_it_ends_with_the_weights_of_an_undisturbed_one(
    killed_and_resumed: Callable[[str], RunFolder],
    config_of: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    recipe: str,
) -> None:
    with started(config_of(recipe), tmp_path / "run") as controller:
        undisturbed = controller.complete()
    assert killed_and_resumed(recipe).summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
