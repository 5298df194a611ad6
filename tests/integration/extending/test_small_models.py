"""The pages about small models, followed to the letter in an empty folder, make a model and train it by PPO."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.extending.recipes import PROJECT, Folder, read_recipe


def followed(page: str, folder: Path) -> Path:
    """Follows a page of docs/ and returns the folder."""
    _, recipe = read_recipe(PROJECT / "docs" / page)
    Folder(folder).follow(recipe)
    return folder


def test_the_page_about_a_tiny_model_makes_one_and_trains_it_for_a_step(tmp_path: Path) -> None:
    summary = json.loads((followed("tiny-model.md", tmp_path) / "runs/tiny/summary.json").read_text())
    assert summary["global_step"] == 1


def test_the_page_about_a_warm_start_makes_a_model_that_speaks_to_its_environment(tmp_path: Path) -> None:
    lines = (followed("warm-start.md", tmp_path) / "runs/warm/rollouts/train/1.jsonl").read_text().splitlines()
    conversations = [json.loads(line)["messages"] for line in lines]
    guesses = [said["content"] for messages in conversations for said in messages if said["role"] == "assistant"]
    assert len(conversations) == 9
    assert sum(guess in set("123456789") for guess in guesses) > 0.8 * len(guesses) > 9
