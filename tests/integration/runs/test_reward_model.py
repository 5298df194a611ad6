"""Runs in which a reward model on the critic's group scores conversations, alone and beside a reward function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from tests import models
from tests.kill_matrix.cells import Cell
from tests.kill_matrix.harness import run_cells, undisturbed_digests, with_incidents
from tests.runs import Inputs, RunFolder, started

COEF = {"sort_letters": 0.25, "default": 2.0}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _conversation(index: int) -> dict[str, Any]:
    """As a preference data set has them: several turns, no ground truth, no reward function."""
    turns = [f"is it safe to mix {index} and soap?", "it depends. why?", f"i have {index} stains."]
    roles = ("user", "assistant", "user")
    return {
        "prompt": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)],
        "data_source": "harmless",
        "reward_model": {"style": "model", "ground_truth": ""},
    }


def _sorting(letters: str) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"sort {letters}"}]
    return {"prompt": prompt, "data_source": "sort_letters", "reward_model": {"style": "rule", "ground_truth": letters}}


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with a chat template of its own."""
    folder = models.save_reward_model(tmp_path_factory.mktemp("models") / "reward", seed=5)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ '#' + m['role'][0] + m['content'] }}{% endfor %}<eos>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def scored_by_model(inputs: Inputs, reward_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three streamed steps over conversations and letters to sort; no KL."""
    rows = [row for index in range(8) for row in (_conversation(index), _sorting("dcba"))]
    data = tmp_path_factory.mktemp("data") / "mixed.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = inputs.config()
    files = {"train_files": str(data), "val_files": str(data), "max_prompt_length": 96}
    return {
        **config,
        "run": {"total_steps": 3},
        "data": {**config["data"], **files},
        "algorithm": {"lam": 0.95},
        "reward": {},
        "reward_model": {"model": str(reward_model), "coef": COEF},
        "tracking": {"dump_rollouts": True},
    }


def _rollouts(folder: RunFolder, split: str) -> list[dict[str, Any]]:
    files = sorted((folder.path / "rollouts" / split).glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def _model_score(model: Any, tokenizer: Any, prompt: list[dict[str, str]], response: str) -> float:
    messages = [*prompt, {"role": "assistant", "content": response}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        return float(model(input_ids=ids).logits)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_model_and_function_score_a_run_together(
    scored_by_model: dict[str, Any], reward_model: Path, tmp_path: Path, num_ranks: int
) -> None:
    overrides = ("run.schedule=overlap", f"services.critic.num_processes={num_ranks}")
    with started(scored_by_model, tmp_path / "run", *overrides) as controller:
        folder = controller.complete()

    model = AutoModelForSequenceClassification.from_pretrained(reward_model)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(reward_model)
    prompts = {json.dumps(row["prompt"]): row["prompt"] for row in map(json.loads, _data_lines(scored_by_model))}
    by_text = {"".join(f"{m['role'][0]}:{m['content']}\n" for m in p) + "a:": p for p in prompts.values()}
    lines = _rollouts(folder, "train")
    assert {line["data_source"] for line in lines} == {"harmless", "sort_letters"}
    for line in lines:
        assert (line["rule_score"] is None) is (line["data_source"] == "harmless")
        weighted = COEF.get(line["data_source"], COEF["default"]) * line["model_score"]
        assert line["score"] == pytest.approx((line["rule_score"] or 0.0) + weighted, abs=1e-5)
    for line in lines[::7]:
        expected = _model_score(model, tokenizer, by_text[line["prompt"]], line["response"])
        assert line["model_score"] == pytest.approx(expected, abs=1e-4)

    assert {line["data_source"] for line in _rollouts(folder, "val")} == {"sort_letters"}
    assert "validation is by reward functions, and data_source harmless has none" in controller.output
    steps = folder.metrics[1:]  # after the validation of the initial policy
    assert len(steps) == 3
    assert all({"reward/rule/mean", "reward/model/mean", "reward/model/max"} <= line.keys() for line in steps)
    spans = [span for span in folder.spans() if span["name"] == "reward_model"]
    assert {span["pool"] for span in spans} == {"critic"}
    assert len(spans) == 3 * scored_by_model["rollout"]["stream_groups"]


def _data_lines(config: dict[str, Any]) -> list[str]:
    return Path(config["data"]["train_files"]).read_text().splitlines()


@pytest.mark.extended
@pytest.mark.parametrize("schedule", ["serial", "gather"])
def test_the_schedule_changes_no_weight(scored_by_model: dict[str, Any], tmp_path: Path, schedule: str) -> None:
    digests = [
        undisturbed_digests({**scored_by_model, "run": {"total_steps": 2, "schedule": name}}, tmp_path / name / "run")
        for name in ("overlap", schedule)
    ]
    assert digests[0] == digests[1]


@pytest.mark.extended
def test_a_critic_that_dies_while_it_scores_costs_no_more_than_time(
    scored_by_model: dict[str, Any], tmp_path: Path
) -> None:
    config = with_incidents(scored_by_model)
    undisturbed = undisturbed_digests(config, tmp_path / "undisturbed" / "run")
    cell = Cell("critic_0", "computing_reward_scores", "critic.compute_reward_scores", step=2)
    verdict = run_cells([cell], config, tmp_path / "run")
    assert verdict.failures(undisturbed) == []
