"""verl's keys of conversations of several turns, beside an environment that the user names by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.verl_launch import ACTOR, ROLLOUT, config_of, finding, translated

pytestmark = pytest.mark.slow

TURNS = f"{ROLLOUT}.multi_turn"
ON = f"{TURNS}.enable=True"
FUNCTIONS = f"+{TURNS}.function_tool_path=tools.py"
TOOLS = f"{TURNS}.tool_config_path=tools.yaml"


@pytest.mark.parametrize(
    ("overrides", "name", "expected"),
    [
        (("max_assistant_turns=5",), "max_turns", 5),
        (("max_user_turns=5",), "max_turns", 6),
        (("max_assistant_turns=5", "max_user_turns=5"), "max_turns", 5),
        (("max_assistant_turns=5", "max_user_turns=3"), "max_turns", 4),
        (("max_assistant_turns=null",), "max_turns", 512),
        ((), "max_turns", 512),
        (("max_parallel_calls=3",), "max_parallel_calls", 3),
        (("format=qwen3_coder",), "tool_format", "qwen3_coder"),
        ((), "tool_format", "hermes"),
        (("max_tool_response_length=700",), "max_observation_length", 732),
        (("max_tool_response_length=700", "max_parallel_calls=3"), "max_observation_length", 2132),
        (("max_tool_response_length=100000",), "max_observation_length", 8192),
        ((), "max_observation_length", 288),
    ],
)
def test_limits_are_taken(tmp_path: Path, overrides: tuple[str, ...], name: str, expected: object) -> None:
    given = (ON, TOOLS, *(f"{TURNS}.{override}" for override in overrides))
    multi_turn = config_of(tmp_path, *given).rollout.multi_turn
    assert getattr(multi_turn, name) == expected


@pytest.mark.parametrize("key", ["max_model_len", "engine_kwargs.vllm.max_model_len"])
def test_an_engine_that_is_shorter_than_a_conversation_is_the_limit_of_a_context(tmp_path: Path, key: str) -> None:
    lengths = (f"+{ROLLOUT}.{key}=4096", "data.max_response_length=20000", f"{ACTOR}.use_dynamic_bsz=True")
    config = config_of(tmp_path, TOOLS, *lengths)
    assert (config.rollout.multi_turn.max_context_length, config.rollout.vllm.max_model_len) == (4096, None)
    assert config.actor.ppo_max_token_len_per_gpu == 16384
    longer = config_of(tmp_path, TOOLS, f"+{ROLLOUT}.{key}=30000", *lengths[1:])
    assert (longer.rollout.multi_turn.max_context_length, longer.rollout.vllm.max_model_len) == (None, 30000)
    note = translated(tmp_path, TOOLS, *lengths).comments["rollout.multi_turn.max_context_length"]
    assert note.startswith("a turn ends where the context is full")


def test_a_length_in_characters_is_explained(tmp_path: Path) -> None:
    comments = translated(tmp_path, TOOLS, f"{TURNS}.max_tool_response_length=700").comments
    sentence = "the tokens of all that follows a turn; verl's is the characters of each tool's text"
    assert comments["rollout.multi_turn.max_observation_length"] == sentence


@pytest.mark.parametrize(
    "on", [ON, TOOLS, f"+{TURNS}.function_tool_path=a.py", f"{ROLLOUT}.agent.default_agent_loop=a"]
)
@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("format=gpt-oss", "a parser of your own: rollout.multi_turn.tool_format, as file.py:function"),
        ("tool_response_truncate_side=left", "a long text is cut in its middle"),
        ("use_inference_chat_template=True", "what was sampled stays in the conversation as it is"),
        ("num_repeat_rollouts=2", "rollout.n"),
    ],
)
def test_what_conversations_do_otherwise_must_be_decided(tmp_path: Path, on: str, override: str, instead: str) -> None:
    translation = translated(tmp_path, on, f"{TURNS}.{override}")
    found = finding(translation, f"{TURNS}.{override.partition('=')[0]}")
    assert (found.outcome, found.note) == ("to be decided", instead)


@pytest.mark.parametrize(
    "override", ["tool_response_truncate_side=middle", "use_inference_chat_template=False", "num_repeat_rollouts=null"]
)
def test_what_conversations_do_alike_is_said(tmp_path: Path, override: str) -> None:
    translation = translated(tmp_path, ON, TOOLS, f"{TURNS}.{override}")
    assert translation.stopping == []
    assert finding(translation, f"{TURNS}.{override.partition('=')[0]}").note == "off"


@pytest.mark.parametrize(
    ("overrides", "files"),
    [
        ((TOOLS,), ["tools.yaml"]),
        ((FUNCTIONS,), ["tools.py"]),
        ((ON, TOOLS, FUNCTIONS, f"{ROLLOUT}.agent.default_agent_loop=tool_agent"), ["tools.yaml", "tools.py"]),
        ((TOOLS, "+data.tool_config_path=tools.yaml", "+data.need_tools_kwargs=True"), ["tools.yaml"]),
    ],
)
def test_files_of_tools_are_taken_as_they_are(tmp_path: Path, overrides: tuple[str, ...], files: list[str]) -> None:
    environments = config_of(tmp_path, *overrides).rollout.multi_turn.environments
    assert {name: list(environment.tools) for name, environment in environments.items()} == {"default": files}
    comment = translated(tmp_path, *overrides).comments["rollout.multi_turn.environments"]
    assert comment == "the files as they are; rewards of tools count, which verl only records"


def test_a_run_of_one_turn_has_no_such_keys(tmp_path: Path) -> None:
    assert not [key for key in translated(tmp_path).values if key.startswith("rollout.multi_turn")]
