"""`python -m controller play`: one conversation in the terminal, by hand and by the model."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.qwen2_tokenizer import train_tokenizer
from tests.support import models
from tests.support.groups import PROJECT, wait_until
from tests.support.user_tools import write

NUM_TOKENS = 300  # all bytes, and some more
TEMPLATE = """{%- if tools %}<tools>{{ tools[0].function.name }}</tools>{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
CODE = '''
from environments.chat import Step


class Riddle:
    """Rewards each turn by its length; the second one ends it."""

    def reset(self, *, ground_truth, seed):
        self.number = 0
        return f" {ground_truth}?"

    def step(self, text):
        self.number += 1
        return Step(f"{text.count(chr(10))} line ends", reward=len(text) / 4, done=self.number == 2, info={"effort": 3})

    def get_reward(self):
        return {"score": 0.5, "won": True}


class Words:
    """Has a tool."""

    def reset(self):
        pass

    def look(self, key: str):
        """Looks a word up.

        Args:
            key: the word.
        """
        return key[::-1]

    def get_reward(self):
        return 1.0


class NoBoard:
    def reset(self, *, board):
        pass

    def step(self, text):
        return ""


class Breaks:
    def reset(self):
        pass

    def step(self, text):
        raise RuntimeError("out of cards")


async def forget(chat, row):
    turn = await chat.turn()
    chat.reward(0.25)
    await chat.turn({"role": "user", "content": f"you said {turn.text}"})
    return 1.0
'''


AGENT = """
from openai import OpenAI


def ask(endpoint, row):
    client = OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    for question in ("who?", "why?"):
        messages = [{"role": "user", "content": question}]
        answer = client.chat.completions.create(model=endpoint.model, messages=messages).choices[0].message
    if answer.content == "because":
        raise ValueError("no reason")
    return 0.5
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration with a model, two prompts and the environments above, of which a test names one."""
    folder = tmp_path_factory.mktemp("play")
    models.save_policy(folder / "model", vocab_size=NUM_TOKENS)
    train_tokenizer(["a word"], vocab_size=NUM_TOKENS, special_tokens=models.SPECIAL).save(
        str(folder / "model/tokenizer.json")
    )
    (folder / "template.jinja").write_text(TEMPLATE)
    write(folder, CODE)
    write(folder, AGENT, "agent.py")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"go {number}"}],
            "data_source": "riddles",
            "reward_model": {"ground_truth": f"truth {number}"},
        }
        for number in (1, 2)
    ]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tree: dict[str, Any] = {
        "run": {"dir": str(folder / "runs/run"), "total_steps": 1},
        "data": {
            "train_files": str(folder / "train.jsonl"),
            "train_batch_size": 2,
            "max_prompt_length": 80,
            "max_response_length": 400,
            "chat_template": str(folder / "template.jinja"),
        },
        "rollout": {"multi_turn": {"tool_format": "hermes"}},
        "actor": {"model": str(folder / "model"), "ppo_mini_batch_size": 2},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder


def command(folder: Path, name: str, *options: str) -> list[str]:
    environments = f"{{default: {{path: {folder}/mine.py, name: {name}}}}}" if name else "{}"
    own = ("--config", str(folder / "config.yaml"), f"rollout.multi_turn.environments={environments}")
    return [sys.executable, "-m", "controller", "play", *own, *options]


def played(folder: Path, name: str, typed: str, *options: str, status: int = 0) -> list[str]:
    """Plays with an environment by what is typed; returns the lines that are printed, those of an error at the end."""
    done = subprocess.run(
        command(folder, name, *options), input=typed, cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


def test_a_conversation_shows_its_texts_rewards_and_score(folder: Path) -> None:
    lines = played(folder, "Riddle", "abc\n\\\nde\n\n//x\n\n", "--row", "2")
    assert lines[0] == f"environment: Riddle of {folder}/mine.py"
    assert lines[1] == f"row: {folder}/train.jsonl, line 2, data_source 'riddles', ground truth 'truth 2'"
    text = "\n".join(lines[3:])
    assert "    user: go 2 truth 2?<eos>assistant: \n--- turn 1: 8 tokens; 392 left in the response" in text
    assert "    abc\n    \n    de<eos>\n    [reward 1.75, 1.75 so far, notes: effort 3.0]" in text
    assert "    user: 2 line ends<eos>assistant: \n--- turn 2" in text
    assert "    /x<eos>\n" in text
    assert lines[-4].startswith("=== over: ended by environment after 2 turns; the response has ")
    assert lines[-3:] == [
        "rewards of the turns: 1.75, 0.5; at the end: 0.5",
        "fields: effort 3.0, won True",
        "score: 2.75",
    ]


def test_a_call_is_written_as_the_model_writes_it(folder: Path) -> None:
    lines = played(folder, "Words", '/call look {"key": "abc"}\n\n<tool_call>\nno json\n</tool_call>\n\nbye\n\n')
    assert lines[0].endswith(", with the tools look (tool_format: hermes)")
    text = "\n".join(lines)
    assert '    <tool_call>\n    {"name": "look", "arguments": {"key": "abc"}}\n    </tool_call><eos>\n' in text
    assert "[calls: 1]" in text
    assert "    tool: cba<eos>assistant: " in text
    assert "[calls: 1, bad calls: 1]" in text
    assert "after 3 turns" in text
    assert lines[-1] == "score: 1"


def test_a_coroutine_and_the_tokens_of_a_context(folder: Path) -> None:
    lines = played(folder, "forget", "/no\n/tokens\n/call\nab\n/cut\nc\n\n", "--tokens")
    assert "    /no is no command: /help names them, // begins a line with /" in lines
    assert "    /call: expected a name, then arguments as a JSON object" in lines
    shown = next(number for number, line in enumerate(lines) if line.startswith("--- prompt"))
    length = int(lines[shown].split()[2])
    again = lines.index("  prompt:")
    assert lines[again + 1 : again + 1 + length] == lines[shown + 1 : shown + 1 + length]
    turn = lines.index("--- turn 1: 2 tokens; 398 left in the response")
    assert [line.split()[1] for line in lines[turn + 1 : turn + 3]] == ["'a'", "'b'"]
    assert lines[-1] == "score: 1.25"


@pytest.mark.parametrize("name", ["Riddle", ""])
def test_a_turn_has_at_least_one_token(folder: Path, name: str) -> None:
    agent = () if name else ("--agent", f"{folder}/agent.py:ask")
    lines = played(folder, name, "/cut\n\\\n/cut\nab\n/cut\n/quit\n", *agent)
    assert lines.count("    nothing is typed yet: a turn that is ended so has at least one token") == 2
    assert any(line.startswith("--- turn 1: 2 tokens") for line in lines)


def test_an_agent_begins_contexts_and_its_error_is_told(folder: Path) -> None:
    agent = ("--agent", f"{folder}/agent.py:ask")
    lines = played(folder, "", "me\n\nso\n\n", *agent)
    assert lines[0] == f"environment: {folder}/agent.py:ask"
    text = "\n".join(lines)
    assert "--- prompt: " in text
    assert "    user: who?<eos>assistant: \n--- turn 1" in text
    assert "--- a context begins anew, and the model sees nothing before it: " in text
    assert "    user: why?<eos>assistant: \n--- turn 2" in text
    assert "score: 0.5" in lines
    failed = "\n".join(played(folder, "", "me\n\nbecause\n\n", *agent))
    assert f"[the agent failed: {folder}/agent.py:ask, line 11: ValueError: no reason" in failed


@pytest.mark.parametrize(
    ("name", "options", "status", "sentence"),
    [
        ("", (), 2, "rollout.multi_turn.environments: expected an environment to play with, got none"),
        ("Riddle", ("--row", "3"), 2, "--row: expected 1 to 2, the number of training prompts, got 3"),
        ("NoBoard", (), 1, "the environment failed when it began: NoBoard of {f}: reset wants the field 'board'"),
        ("Breaks", (), 1, "the environment failed: Breaks of {f}, line 51: step: RuntimeError: out of cards"),
        ("Riddle", (), 1, "the input ended before the conversation was over"),
    ],
)
def test_what_cannot_go_on_is_one_sentence(
    folder: Path, name: str, options: tuple[str, ...], status: int, sentence: str
) -> None:
    *_, last = played(folder, name, "a\n\n", *options, status=status)
    assert last.startswith(f"error: {sentence.format(f=folder / 'mine.py')}")


def test_whoever_leaves_gets_no_score(folder: Path) -> None:
    assert played(folder, "Riddle", "abc\n/quit\n")[-1] == "left before the conversation was over: nothing is scored"


def test_a_response_that_is_full_ends_the_conversation(folder: Path) -> None:
    lines = played(folder, "Riddle", "a" * 40 + "\n\n", "data.max_response_length=20")
    assert "    [the turn has 20 of the 41 typed tokens: there is room for no more]" in lines
    assert lines[-4].startswith("=== over: ended by length after 1 turn; the response has 20 tokens, 20 of them")


def test_ctrl_c_on_a_terminal_ends_all_that_was_started(folder: Path) -> None:
    terminal, of_child = pty.openpty()
    process = subprocess.Popen(
        # SIGINT is ignored in what a shell has started in the background.
        ["env", "--default-signal=INT", *command(folder, "Riddle")],
        stdin=of_child,
        stdout=of_child,
        stderr=of_child,
        cwd=PROJECT,
        start_new_session=True,
    )
    os.close(of_child)
    try:
        shown = b""
        while b"turn 1> " not in shown:
            shown += os.read(terminal, 65536)
        children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        assert children
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 30.0, "the end of its children")
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_the_model_plays_and_the_run_folder_stays_as_it_is(folder: Path) -> None:
    plays = [played(folder, "Riddle", "", "--model") for _ in range(2)]
    assert plays[0] == plays[1]
    assert f"the model: {folder}/model" in plays[0]
    assert plays[0][-1].startswith("score: ")
    assert sorted(path.name for path in folder.iterdir()) == [
        *("agent.py", "config.yaml", "mine.py", "model", "template.jinja", "train.jsonl")
    ]
