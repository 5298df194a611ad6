"""Agents of frameworks that others wrote, unchanged, are trained: one in an environment process, one as a program."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.qwen2_tokenizer import train_tokenizer
from tests.support import models
from tests.support.groups import PROJECT
from tests.support.runs import RunFolder

HERE = Path(__file__).parent
PYTHON = PROJECT / ".venv-agents" / "bin" / "python"
NUM_TOKENS = 600
TEMPLATE = """{%- if tools %}tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<eos>{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-agents: make test-agents"),
]


def trained(folder: Path, config: Path | str, *overrides: str) -> RunFolder:
    """Runs a configuration to its end by the Python that has the frameworks."""
    command = [str(PYTHON), "-m", "controller", "--config", str(config), f"run.dir={folder}", *overrides]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return RunFolder(folder)


def test_an_agent_of_openai_agents_learns_to_find_numbers(tmp_path: Path) -> None:
    """It is a function in an environment process; the model is that of the recipe guess_number."""
    subprocess.run([str(PYTHON), "-m", "recipes.guess_number.prepare"], cwd=PROJECT, check=True)
    run = trained(
        tmp_path / "run",
        "recipes/guess_number/cpu.yaml",
        f"rollout.multi_turn.environments={{default: {{agent: {HERE}/with_openai_agents.py:run}}}}",
        *("run.total_steps=6", "data.train_batch_size=256", "evaluation.min_accuracy=0"),
    )
    validation = run.summary["validation"]
    assert validation["after"]["overall"] >= validation["before"]["overall"] + 0.2
    for step in run.metrics[1:]:
        assert 3 < step["num_turns/mean"] <= step["num_turns/max"] == 5
        assert step["environment/num_lost"] == 0


def config_of_smolagents(folder: Path) -> Path:
    """Writes the configuration of a run whose model has random weights, and tokens of several letters."""
    models.save_policy(folder / "model", vocab_size=NUM_TOKENS, max_position_embeddings=4096)
    texts = [
        file.read_text() for file in sorted(PYTHON.parents[1].glob("lib/*/site-packages/smolagents/prompts/tool*.yaml"))
    ]
    tokenizer = train_tokenizer(texts, vocab_size=NUM_TOKENS, special_tokens=models.SPECIAL)
    tokenizer.save(str(folder / "model/tokenizer.json"))
    (folder / "template.jinja").write_text(TEMPLATE)
    row = {"prompt": "?", "data_source": "letters", "reward_model": {"ground_truth": "e"}}
    (folder / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    program = {"command": [str(PYTHON), str(HERE / "with_smolagents.py")], "reward": "output"}
    tree: dict[str, Any] = {
        "run": {"total_steps": 2},
        "data": {
            "train_files": str(folder / "train.jsonl"),
            "train_batch_size": 8,
            "max_prompt_length": 2500,
            "max_response_length": 8000,
            "chat_template": str(folder / "template.jinja"),
        },
        "rollout": {
            "multi_turn": {
                "environments": {"default": program},
                "tool_format": "hermes",
                "max_turn_length": 24,
                "max_context_length": 3000,
            }
        },
        "algorithm": {"lam": 0.95},
        "actor": {"model": str(folder / "model"), "lr": 1e-2, "ppo_mini_batch_size": 4},
        "critic": {"lr": 1e-2},
        "evaluation": {"test_freq": -1},
        "tracking": {"trackers": [], "report": False},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder / "config.yaml"


def test_an_agent_of_smolagents_is_trained(tmp_path: Path) -> None:
    """It is a program, a process for each conversation, and each of its requests begins a context anew."""
    run = trained(tmp_path / "run", config_of_smolagents(tmp_path))
    steps = [step for step in run.metrics if "critic/score/mean" in step]
    assert len(steps) == 2
    for step in steps:
        assert step["environment/num_lost"] == step["environment/num_agent_errors"] == 0
        assert step["num_contexts/min"] >= 2
        assert 0.0 < step["critic/score/max"] <= 1.0
        assert step["actor/grad_norm"] > 0.0
