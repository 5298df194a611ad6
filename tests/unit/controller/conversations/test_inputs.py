"""The inputs of a run with environments: every mistake is one sentence, before the run starts or goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from controller.conversations.trial import try_environments
from controller.preflight import load_inputs
from controller.run.folder import RunFolder
from recipes.qwen2_tokenizer import character_tokenizer, save_tokenizer
from splitppo.config import Config, ConfigError, load_config
from tests.support import user_environments
from tests.support.fake_services import make_config

pytestmark = pytest.mark.slow

MULTI_TURN = "rollout__multi_turn"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.content }}{{ '<eos>' if message.role == 'assistant' }}{% endfor %}"
)
GAME = {"path": user_environments.__file__, "name": "Game"}
TALKS: dict[str, Any] = {MULTI_TURN: {"environments": {"default": GAME}}}


def write_model(folder: Path, **sizes: int) -> str:
    """A model folder as far as the controller reads it."""
    save_tokenizer(character_tokenizer("abcdefghij ", ["<eos>"]), folder, named_tokens={"eos_token": "<eos>"})
    (folder / "config.json").write_text(json.dumps({"vocab_size": 20, **sizes}))
    save_file({"weight": np.zeros(1, np.float32)}, folder / "model.safetensors")
    return str(folder)


def write_rows(file: Path, *data_sources: str, prompt: Any = "abc") -> str:
    rows = [{"prompt": prompt, "data_source": name, "reward_model": {"ground_truth": "c"}} for name in data_sources]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """A config of a run with four riddles, which no reward function scores; changes replace its keys."""
    actor = write_model(tmp_path / "actor")
    riddles = write_rows(tmp_path / "riddles.jsonl", *["riddle"] * 4)

    def config(**changes: Any) -> Config:
        return make_config(tmp_path / "run", **{"actor__model": actor, "data__train_files": riddles} | changes)

    return config


def test_sources_with_an_environment_need_no_scorer_and_have_one_if_there_is_one(tmp_path: Path, make: Any) -> None:
    with pytest.raises(ConfigError, match="no reward for data_source 'riddle'"):
        load_inputs(make())
    assert load_inputs(make(**TALKS)).scored_sources(make(**TALKS)) == frozenset()

    val = write_rows(tmp_path / "val.jsonl", "openai/gsm8k", "riddle")
    reward_model = {"reward_model__model": write_model(tmp_path / "rm", num_labels=1)}
    for config in (make(data__val_files=val, **TALKS), make(data__val_files=val, **TALKS, **reward_model)):
        inputs = load_inputs(config)
        assert inputs.scored_sources(config) == {"openai/gsm8k"}
        assert inputs.val_prompts is not None
        assert inputs.val_prompts.num_prompts == 2


def test_tools_alone_give_no_score(tmp_path: Path, make: Any) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    tools = {"environments": {"default": {"tools": f"{user_environments.__file__}:lookup"}}, "tool_format": "hermes"}
    keys: dict[str, Any] = {"data__chat_template": str(tmp_path / "template.jinja"), "rollout__multi_turn": tools}
    with pytest.raises(ConfigError, match=r"^tools alone give no reward: no reward for data_source 'riddle'"):
        load_inputs(make(**keys))
    with pytest.raises(ConfigError, match=r"max_prompt_length \(2 tokens; .*, with its tools\): raise it$"):
        load_inputs(make(**keys, data__max_prompt_length=2))


def test_a_program_without_reward_gives_no_score(tmp_path: Path, make: Any) -> None:
    def program(**keys: Any) -> dict[str, Any]:
        return {MULTI_TURN: {"environments": {"default": {"command": ["sh"], **keys}}}}

    with pytest.raises(ConfigError, match=r"^a program without reward gives none: .*: no reward for data_source"):
        load_inputs(make(**program()))
    judged = {"reward__scorers": {"riddle": [{"name": "openai/gsm8k"}]}}
    reward_model = {"reward_model__model": write_model(tmp_path / "rm", num_labels=1)}
    for keys in (program(reward="output"), program(reward="endpoint"), program() | judged, program() | reward_model):
        assert load_inputs(make(**keys))


def test_what_an_environment_returns_is_not_known_before_the_run(make: Any) -> None:
    filters = {"algorithm__filter_groups__enable": True, "rollout__n": 2}
    assert load_inputs(make(algorithm__filter_groups__metric="num_wins", **filters, **TALKS))


def test_a_data_source_without_an_environment_is_named(tmp_path: Path, make: Any) -> None:
    sentence = r"^rollout\.multi_turn\.environments: no environment for data_source 'web'; name it, or default$"
    riddles_alone = {MULTI_TURN: {"environments": {"riddle": GAME}}}
    web = write_rows(tmp_path / "web.jsonl", "riddle", "web", "riddle", "riddle")
    load_inputs(make(**riddles_alone))
    for files in ({"data__train_files": web}, {"data__val_files": web}):
        with pytest.raises(ConfigError, match=sentence):
            load_inputs(make(**files, **riddles_alone))
        load_inputs(make(**files, **TALKS))


def test_tools_need_a_template_that_takes_them(make: Any) -> None:
    sentence = (
        r"^rollout\.multi_turn\.tool_format: the chat template of actor\.model takes no tools; set data\.chat_template,"
        r" or use step$"
    )
    for environment in ({"tools": f"{user_environments.__file__}:lookup"}, {**GAME, "name": "Riddle"}):
        with pytest.raises(ConfigError, match=sentence):
            load_inputs(make(**{MULTI_TURN: {"environments": {"default": environment}}}))


def test_a_conversation_longer_than_the_model_is_refused(tmp_path: Path, make: Any) -> None:
    model = write_model(tmp_path / "short", max_position_embeddings=515)
    talks = {MULTI_TURN: {**TALKS[MULTI_TURN], "max_turn_length": 8}}
    with pytest.raises(ConfigError, match=r"^actor\.model has max_position_embeddings 515, .*\(516 tokens\)"):
        load_inputs(make(actor__model=model, data__max_prompt_length=4, data__max_response_length=512, **talks))


def test_prompts_and_the_check_name_the_tools_of_their_data_source(tmp_path: Path, make: Any) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    prompt = [{"role": "user", "content": "abc"}]
    train = write_rows(tmp_path / "two.jsonl", "riddle", "other", "other", "riddle", prompt=prompt)
    environments = {"riddle": {**GAME, "name": "Riddle"}, "default": GAME}
    config = make(
        data__train_files=train,
        data__chat_template=str(template),
        rollout__multi_turn={"environments": environments, "tool_format": "hermes"},
    )

    inputs = load_inputs(config)
    table = inputs.prompts.table

    assert table.texts == ("guess abc", "abc", "abc", "guess abc")
    told = asyncio.run(try_environments(config, inputs.tokenizer, [table]))
    file = user_environments.__file__
    assert told == (
        f"environments: riddle: Riddle of {file} with the tools guess; default: Game of {file} (tool_format: hermes)\n"
    )


def test_a_resumed_run_keeps_its_reply_steps_and_its_environments(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def start(**changes: Any) -> None:
        with RunFolder(make_config(run_dir, **changes)):
            (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')

    start(**TALKS)
    start(**TALKS, services={"actor": {"devices": [0]}, "critic": {"devices": [1]}})
    assert load_config(run_dir / "config.yaml").rollout.multi_turn.reply_steps == 32
    with pytest.raises(ConfigError, match=r"rollout\.multi_turn\.reply_steps: 32 in the folder, 4 now"):
        start(**{MULTI_TURN: {**TALKS[MULTI_TURN], "reply_steps": 4}})
    with pytest.raises(ConfigError, match=r"rollout\.multi_turn\.environments.*in the folder"):
        start(**{MULTI_TURN: {"environments": {"default": {**GAME, "name": "B"}}}})
    start(**{MULTI_TURN: {**TALKS[MULTI_TURN], "timeout_s": 5, "num_workers": 2, "max_error_rate": 1}})


HIDDEN = """
class Hidden:
    def reset(self, *, row, ground_truth):
        self.row = row

    def step(self, text):
        return text

    def privileged(self):
        if self.row == 9:
            raise KeyError("no card")
        return {"hidden": "a" * self.row, **({"ground_truth": "c"} if self.row == 8 else {})}
"""


@pytest.mark.parametrize(
    ("rows", "template", "sentence"),
    [
        ((1, 2, 3), "{hidden}{ground_truth}{row}", ""),
        ((1, 2, 3, 9), "{hidden}", ""),  # the fourth row is not tried
        (
            (1, 2, 7),
            "{hidden}",
            r"line 3: critic\.privileged_prompt: it has 7 tokens, more than critic\.max_",
        ),
        ((1, 2, 3), "{hidden}{other}", "line 1: critic.privileged_prompt: there is no field 'other': .*names hidden"),
        ((1, 8, 3), "{ground_truth}", r"line 2: .*'ground_truth' is in the row and in privileged\(\)"),
        ((9,), "{hidden}", "line 1: the environment failed when it began: Hidden .*line 11: privileged: KeyError"),
    ],
)
def test_what_environments_name_for_the_critic_is_tried(
    tmp_path: Path, make: Any, rows: tuple[int, ...], template: str, sentence: str
) -> None:
    (tmp_path / "hidden.py").write_text(HIDDEN)
    lines = [
        {"prompt": "abc", "data_source": "a", "reward_model": {"ground_truth": "c"}, "extra_info": {"row": row}}
        for row in rows
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = make(
        data__train_files=str(tmp_path / "rows.jsonl"),
        data__train_batch_size=1,
        critic__privileged_prompt=template,
        critic__max_privileged_length=6,
        **{MULTI_TURN: {"environments": {"default": {"path": str(tmp_path / "hidden.py"), "name": "Hidden"}}}},
    )
    inputs = load_inputs(config)
    if not sentence:
        asyncio.run(try_environments(config, inputs.tokenizer, inputs.tables))
        return
    with pytest.raises(ConfigError, match=sentence):
        asyncio.run(try_environments(config, inputs.tokenizer, inputs.tables))


def test_a_text_for_the_critic_is_checked_of_every_training_row(tmp_path: Path, make: Any) -> None:
    files = write_rows(tmp_path / "web.jsonl", *["riddle"] * 7)
    lookup = {MULTI_TURN: {"environments": {"default": {**GAME, "name": "Game"}}}}
    reward = {"reward__scorers": {"riddle": [{"name": "sort_letters"}]}}
    for own in (reward, lookup):  # a class may name fields that the row lacks, and no fewer than it has
        config = make(data__train_files=files, critic__privileged_prompt="{ground_truth}", **own)
        load_inputs(config)
        with pytest.raises(ConfigError, match=r"line 1: critic\.privileged_prompt: it has 2 tokens, more than"):
            load_inputs(config.changed("critic", {"privileged_prompt": "{ground_truth}a", "max_privileged_length": 1}))
    with pytest.raises(ConfigError, match=r"line 1: critic\.privileged_prompt: there is no field 'hidden'"):
        load_inputs(make(data__train_files=files, critic__privileged_prompt="{hidden}", **reward))
