"""Each recipe of docs/extending/, followed to the letter, gives what it promises."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.extending.recipes import Action, Copy, read_recipes

RECIPES = read_recipes()
RUFF = ".venv/bin/ruff"


def edits(recipe: Sequence[Action]) -> Sequence[Action]:
    """All but the last block."""
    return recipe[:-1]


def shown_by(recipe: Sequence[Action]) -> Sequence[str]:
    """The paths in the last block, `make test ARGS="path ..."`."""
    [make, target, arguments] = shlex.split(recipe[-1].text)
    assert (make, target) == ("make", "test")
    return arguments.removeprefix("ARGS=").split()


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy in which every recipe was followed, one after the other."""
    copy = Copy(tmp_path_factory.mktemp("all"))
    for recipe in RECIPES.values():
        copy.follow(edits(recipe))
    return copy


def test_every_recipe_ends_with_a_new_test_and_the_command_that_runs_it() -> None:
    assert len(RECIPES) == 10
    for recipe in RECIPES.values():
        assert recipe[-2].how == "a new file"
        assert recipe[-2].file in shown_by(recipe)


@pytest.mark.parametrize("title", RECIPES)
def test_the_recipe_needs_no_other_one(title: str, tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    copy.follow(edits(RECIPES[title]))
    copy.run(f"{RUFF} check --no-cache --quiet --select F .")


@pytest.mark.parametrize(
    "folders",
    [
        pytest.param(("tests/unit", "tests/style"), id="tests/unit"),
        pytest.param(("tests/integration",), id="tests/integration", marks=pytest.mark.extended),
    ],
)
def test_what_the_recipes_show_is_so(followed: Copy, folders: tuple[str, ...]) -> None:
    # In one process: the imports take longer than the tests.
    paths = sorted({path for recipe in RECIPES.values() for path in shown_by(recipe) if path.startswith(folders)})
    followed.run(f'make test ARGS="{" ".join(paths)}"')


def test_with_all_recipes_followed_the_source_passes_its_checks(followed: Copy) -> None:
    followed.run(f"{RUFF} format --no-cache --quiet .\n{RUFF} check --no-cache .\n.venv/bin/lint-imports --no-cache")
