"""Runs in which a reward model scores conversations, alone and beside a function, on the critic's group or its own."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from tests.kill_matrix.cells import Cell
from tests.kill_matrix.harness import run_cells, with_incidents
from tests.support import models
from tests.support.datasets import data_file
from tests.support.runs import Controller, Inputs, RunFolder, started

NUM_CONVERSATIONS, MAX_CHARACTERS = 8, 200
COEF = {"sort_letters": 0.25, "default": 2.0}

pytestmark = pytest.mark.timeout(600)


def _conversations() -> list[list[dict[str, str]]]:
    """Returns conversations of one turn and of three, with neither a ground truth nor a reward function."""
    turns = ("Is it safe to mix {} and soap?", "It depends.\n\nWhy?", 'I have {} stains -- "old" ones: what now?')
    roles = ("user", "assistant", "user")
    return [
        [{"role": role, "content": text.format(n)} for role, text in zip(roles, turns, strict=True)][: 1 + n % 2 * 2]
        for n in range(NUM_CONVERSATIONS)
    ]


def _real_conversations() -> list[list[dict[str, str]]]:
    """Returns short ones of a preference data set."""
    with gzip.open(data_file("hh/harmless-base_test.jsonl.gz"), "rt") as lines:
        found = (_messages(json.loads(line)["chosen"]) for line in lines)
        short = (
            messages for messages in found if sum(len(message["content"]) for message in messages) < MAX_CHARACTERS
        )
        return list(itertools.islice(short, NUM_CONVERSATIONS))


def _messages(transcript: str) -> list[dict[str, str]]:
    """All but the last answer."""
    _, *parts = re.split(r"\n\n(Human|Assistant): ", transcript)
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = [{"role": roles[name], "content": text} for name, text in zip(parts[::2], parts[1::2], strict=True)]
    return turns[:-1]


def _conversation(messages: list[dict[str, str]]) -> dict[str, Any]:
    return {"prompt": messages, "data_source": "harmless", "reward_model": {"style": "model", "ground_truth": ""}}


def _sorting(letters: str) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"sort {letters}"}]
    return {"prompt": prompt, "data_source": "sort_letters", "reward_model": {"style": "rule", "ground_truth": letters}}


def _save_mixed(conversations: list[list[dict[str, str]]], folder: Path) -> Path:
    """Saves conversations and letters to sort, in turn, as a prompt file."""
    rows = [row for messages in conversations for row in (_conversation(messages), _sorting("dcba"))]
    file = folder / "mixed.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


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
    data = _save_mixed(_conversations(), tmp_path_factory.mktemp("data"))
    config = inputs.config()
    files = {"train_files": str(data), "val_files": str(data), "max_prompt_length": 256}
    return {
        **config,
        "run": {"total_steps": 3},
        "data": {**config["data"], **files},
        "algorithm": {"lam": 0.95},
        "reward": {},
        "reward_model": {"model": str(reward_model), "coef": COEF},
        "tracking": {**config["tracking"], "dump_rollouts": True},
    }


def _rollouts(folder: RunFolder, split: str) -> list[dict[str, Any]]:
    files = sorted((folder.path / "rollouts" / split).glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def _model_score(model: Any, tokenizer: Any, prompt: list[dict[str, str]], response: str) -> float:
    messages = [*prompt, {"role": "assistant", "content": response}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        return float(model(input_ids=ids).logits)


@pytest.fixture(scope="module")
def completed(
    scored_by_model: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], Controller]:
    """The run under `overlap`, once for each host and number of its ranks."""

    @functools.cache
    def complete(host: str, num_ranks: int = 1) -> Controller:
        placed = (f"placement.reward_model={host}", f"services.{host}.num_processes={num_ranks}")
        with started(scored_by_model, tmp_path_factory.mktemp(host) / "run", "run.schedule=overlap", *placed) as run:
            run.complete()
        return run

    return complete


HOSTS = [
    ("critic", 1),
    pytest.param("reward", 1, marks=pytest.mark.extended),
    pytest.param("critic", 2, marks=pytest.mark.extended),
    pytest.param("reward", 2, marks=pytest.mark.extended),
]


@pytest.mark.parametrize(("host", "num_ranks"), HOSTS)
def test_model_and_function_score_a_run_together(
    completed: Callable[[str, int], Controller],
    scored_by_model: dict[str, Any],
    reward_model: Path,
    host: str,
    num_ranks: int,
) -> None:
    _check_scores(completed(host, num_ranks), scored_by_model, reward_model, host)


@pytest.mark.extended
def test_model_and_function_score_real_conversations_together(
    scored_by_model: dict[str, Any], reward_model: Path, tmp_path: Path
) -> None:
    file = str(_save_mixed(_real_conversations(), tmp_path))
    data = {**scored_by_model["data"], "train_files": file, "val_files": file}
    config = {**scored_by_model, "data": data}
    with started(config, tmp_path / "run", "run.schedule=overlap") as controller:
        controller.complete()
    _check_scores(controller, config, reward_model, "critic")


def _check_scores(controller: Controller, config: dict[str, Any], reward_model: Path, host: str) -> None:
    folder = controller.folder
    model = AutoModelForSequenceClassification.from_pretrained(reward_model)
    of_model = PreTrainedTokenizerFast.from_pretrained(reward_model)
    prompts = [row["prompt"] for row in map(json.loads, _data_lines(config))]
    by_text = {_shown(prompt): prompt for prompt in prompts}
    lines = _rollouts(folder, "train")
    assert {line["data_source"] for line in lines} == {"harmless", "sort_letters"}
    for line in lines:
        assert (line["rule_score"] is None) is (line["data_source"] == "harmless")
        weighted = COEF.get(line["data_source"], COEF["default"]) * line["model_score"]
        assert line["score"] == pytest.approx((line["rule_score"] or 0.0) + weighted, abs=1e-5)
    for line in lines[::7]:
        expected = _model_score(model, of_model, by_text[line["prompt"]], line["response"])
        assert line["model_score"] == pytest.approx(expected, abs=1e-5)

    assert {line["data_source"] for line in _rollouts(folder, "val")} == {"sort_letters"}
    assert "only reward functions validate, and data_source harmless has none" in controller.output
    steps = folder.metrics[1:]  # after the validation of the initial policy
    assert len(steps) == 3
    assert all({"reward/rule/mean", "reward/model/mean", "reward/model/max"} <= line.keys() for line in steps)
    assert all((f"overlap/bubble_{host}") in line for line in steps)
    spans = [span for span in folder.spans() if span["name"] == "reward_model"]
    assert {span["pool"] for span in spans} == {host}
    assert len(spans) == 3 * config["rollout"]["stream_groups"]
    assert set(folder.summary["weights_sha256"]) == {"actor", "critic"}


def _shown(prompt: list[dict[str, str]]) -> str:
    """A prompt in the policy's chat template."""
    return "".join(f"{turn['role'][0]}:{turn['content']}\n" for turn in prompt) + "a:"


def _data_lines(config: dict[str, Any]) -> list[str]:
    return Path(config["data"]["train_files"]).read_text().splitlines()


@pytest.mark.extended
@pytest.mark.parametrize("host", ["reward", "critic"])
def test_a_group_that_dies_while_it_scores_costs_no_more_than_time(
    completed: Callable[[str, int], Controller], scored_by_model: dict[str, Any], tmp_path: Path, host: str
) -> None:
    """The other groups stay; and on a group of its own the model gives the same scores as on the critic's."""
    cell = Cell(
        f"{host}_0",
        "computing_reward_scores",
        f"{host}.compute_reward_scores",
        overrides=(f"placement.reward_model={host}", "run.schedule=overlap"),
    )
    verdict = run_cells([cell], with_incidents(scored_by_model), tmp_path / "run")
    assert verdict.failures(completed("critic", 1).folder.summary["weights_sha256"]) == []


@pytest.mark.extended
@pytest.mark.parametrize("schedule", ["serial", "gather"])
@pytest.mark.parametrize("host", ["critic", "reward"])
def test_neither_schedule_nor_host_changes_a_weight(
    completed: Callable[[str, int], Controller],
    scored_by_model: dict[str, Any],
    tmp_path: Path,
    schedule: str,
    host: str,
) -> None:
    overrides = (f"run.schedule={schedule}", f"placement.reward_model={host}")
    with started(scored_by_model, tmp_path / "run", *overrides) as controller:
        digests = controller.complete().summary["weights_sha256"]
    assert digests == completed("critic", 1).folder.summary["weights_sha256"]
