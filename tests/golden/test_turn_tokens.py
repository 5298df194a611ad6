"""The tokens of a conversation, put together turn by turn, are those of the chat template's rendering of the whole."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from controller.data.chat_template import load_chat_template
from controller.data.tokenizer import Tokenizer
from controller.data.turn_tokens import TurnTokens
from recipes.qwen2_tokenizer import train_tokenizer

TEMPLATES = Path(__file__).with_name("chat_templates")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks a word up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }
]
QUESTION = {"role": "user", "content": "What is the colour of grass?"}
HERMES = '<tool_call>\n{"name": "look", "arguments": {"key": "grass"}}\n</tool_call>'


@dataclass(frozen=True)
class Family:
    """A model family: the tokens that end a turn, further special ones, and how an assistant writes a call of a tool.

    `calls` is "" if the template takes no tools; `arguments` is how it takes the arguments of a call.
    """

    ends: tuple[str, ...]
    tokens: str
    calls: str = ""
    added: str = ""
    arguments: Any = field(default_factory=lambda: {"key": "grass"})


FAMILIES = {
    "qwen2_5": Family(("<|im_end|>", "<|endoftext|>"), "<|im_start|>", HERMES),
    "qwen3": Family(
        ("<|im_end|>", "<|endoftext|>"),
        "<|im_start|>",
        HERMES,
        "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>",
    ),
    "qwen3_coder": Family(
        ("<|im_end|>", "<|endoftext|>"),
        "<|im_start|>",
        "<tool_call>\n<function=look>\n<parameter=key>\ngrass\n</parameter>\n</function>\n</tool_call>",
        "<tool_call> </tool_call> <tool_response> </tool_response>",
    ),
    "llama3_1": Family(
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|>",
        '{"name": "look", "parameters": {"key": "grass"}}',
    ),
    "mistral_nemo": Family(
        ("</s>",),
        "<s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        '[TOOL_CALLS][{"name": "look", "arguments": {"key": "grass"}, "id": "abcdefghi"}]',
    ),
    "gemma2": Family(("<eos>", "<end_of_turn>"), "<bos> <start_of_turn>"),
    "phi4_mini": Family(("<|endoftext|>", "<|end|>"), "<|user|> <|assistant|> <|system|> <|tool|> <|/tool|>"),
    "deepseek_v3": Family(
        ("<｜end▁of▁sentence｜>",),
        "<｜begin▁of▁sentence｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
        '{"key": "grass"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜>"
        " <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜>"
        " <｜tool▁output▁begin｜> <｜tool▁output▁end｜>",
        arguments='{"key": "grass"}',
    ),
    "glm4_5": Family(
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        "[gMASK] <sop> <|system|> <|assistant|>",
        "\n<think></think>\n<tool_call>look\n<arg_key>key</arg_key>\n<arg_value>grass</arg_value>\n</tool_call>",
        "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key>",
    ),
}
WITH_TOOLS = [name for name, family in FAMILIES.items() if family.calls]
# What the turn of an assistant begins with, if the generation prompt has not written it.
BEGINNINGS = {"glm4_5": "\n<think></think>\n"}


@cache
def load(name: str, **variables: Any) -> Tokenizer:
    """A tokenizer with the special tokens of a family, trained on its template, and the template."""
    family, source = FAMILIES[name], (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    special = [*family.ends, *family.tokens.split()]
    backend = train_tokenizer([source, f"{QUESTION}"], vocab_size=500, special_tokens=special)
    backend.add_tokens([AddedToken(token, special=False) for token in family.added.split()])
    begin = next((token for token in special if re.match(r"<bos>|<s>|<.begin", token)), "")
    named = {"bos_token": begin, "eos_token": family.ends[0], **variables}
    template = load_chat_template(TEMPLATES, {"chat_template": source}, None, named)
    return Tokenizer(backend, tuple(map(backend.token_to_id, family.ends)), template)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.backend.encode(text, add_special_tokens=False).ids


def whole(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
    return encode(tokenizer, tokenizer.chat_template.render(messages, tools))


def put_together(
    tokenizer: Tokenizer,
    turns: Sequence[tuple[str, Sequence[dict[str, Any]]]],
    tools: Sequence[Any] = (),
    end: str = "",
) -> list[int]:
    """The tokens of a prompt, and then of each turn's text, with the token `end`, and of what follows it."""
    turn_tokens, ids = TurnTokens(tokenizer, 1024), whole(tokenizer, [QUESTION], tools)
    for text, following in turns:
        ids += encode(tokenizer, text + end)
        ids += turn_tokens.reply(following, last_token=ids[-1]).tolist()
    return ids


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def call(name: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": FAMILIES[name].arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "abcdefghi", "function": function}],
    }


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "look", "tool_call_id": "abcdefghi", "content": content}


def turn_end(name: str, role: str) -> str:
    """The token with which the model of a family ends a turn before a message of a role."""
    ends = {"glm4_5": {"user": "<|user|>", "tool": "<|observation|>"}, "gemma2": {"user": "<end_of_turn>"}}
    ends |= {"phi4_mini": {"user": "<|end|>", "tool": "<|end|>"}}
    return ends.get(name, {}).get(role, FAMILIES[name].ends[0])


@pytest.mark.parametrize("is_cut", [False, True], ids=["ended", "cut off"])
@pytest.mark.parametrize("name", FAMILIES)
def test_replies_of_a_user_are_those_of_the_whole_conversation(name: str, is_cut: bool) -> None:
    tokenizer = load(name)
    replies = ["And of the sky?\n\n  Today.", "数学: \U0001f600 \x00\x07 é </b>"]
    end, begin = "" if is_cut else turn_end(name, "user"), BEGINNINGS.get(name, "")

    ids = put_together(
        tokenizer,
        [(f"{begin}Green.", [user(replies[0])]), (f"{begin}It is\nblue", [user(replies[1])])],
        end=end,
    )

    messages = [QUESTION, answer("Green."), user(replies[0]), answer("It is\nblue"), user(replies[1])]
    assert ids == whole(tokenizer, messages)


@pytest.mark.parametrize("is_cut", [False, True], ids=["ended", "cut off"])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_replies_of_tools_are_those_of_the_whole_conversation(name: str, is_cut: bool) -> None:
    tokenizer, tools = load(name), TOOLS if load(name).chat_template.takes_tools else ()
    end, text = "" if is_cut else turn_end(name, "tool"), FAMILIES[name].calls

    replies = ["green\n", '{"it": "is"}'][: 1 if name == "deepseek_v3" else None]  # it can render one round of tools

    ids = put_together(tokenizer, [(text, [tool(reply)]) for reply in replies], tools, end)

    messages = [message for reply in replies for message in (call(name), tool(reply))]
    assert ids == whole(tokenizer, [QUESTION, *messages], tools)


@pytest.mark.parametrize("name", sorted({*WITH_TOOLS} - {"llama3_1"}))  # which takes one call in a turn
def test_replies_of_two_tools_are_those_of_the_whole_conversation(name: str) -> None:
    tokenizer, following = load(name), [tool("green\n"), tool("blue")]

    reply = TurnTokens(tokenizer, 1024).reply(following, last_token=-1)

    rendered = whole(tokenizer, [QUESTION, call(name), *following])
    assert rendered[-len(reply) :] == reply.tolist()
    assert tokenizer.backend.id_to_token(reply[0]) == turn_end(name, "tool")


@pytest.mark.parametrize(
    ("name", "thinking", "left", "end"),
    [
        ("qwen3", "<think>\nGrass.\n</think>\n\n", "", "<|im_end|>"),
        ("glm4_5", "\n<think>Grass.</think>\n", "\n<think></think>\n", "<|user|>"),
        ("deepseek_v3", "Grass.\n</think>", "", "<｜end▁of▁sentence｜>"),
    ],
)
def test_a_template_that_drops_earlier_thinking_keeps_it_in_a_conversation(
    name: str, thinking: str, left: str, end: str
) -> None:
    tokenizer = load(name)

    ids = put_together(tokenizer, [(f"{thinking}Green.", [user("And the sky?")])], end=end)

    text = tokenizer.backend.decode(ids, skip_special_tokens=False)
    rendered = tokenizer.chat_template.render([QUESTION, answer(f"{thinking}Green."), user("And the sky?")])
    assert text.replace(thinking, left) == rendered
    assert text != rendered


def test_what_a_template_begins_a_turn_with_stays_in_a_conversation() -> None:
    tokenizer = load("deepseek_v3", thinks="<think>\n")

    ids = put_together(tokenizer, [("Grass.\n</think>Green.", [user("And the sky?")])], end="<｜end▁of▁sentence｜>")

    text = tokenizer.backend.decode(ids, skip_special_tokens=False)
    rendered = tokenizer.chat_template.render([QUESTION, answer("Green."), user("And the sky?")])
    assert text.replace("<think>\nGrass.\n</think>", "") == rendered


def test_rounds_of_tools_that_a_template_writes_otherwise_are_all_written_as_the_first() -> None:
    tokenizer, text = load("deepseek_v3"), FAMILIES["deepseek_v3"].calls
    end = "<｜end▁of▁sentence｜>"

    ids = put_together(tokenizer, [(text, [tool("green")]), (text, [tool("blue")])], end=end)

    rendered = tokenizer.chat_template.render(
        [QUESTION, call("deepseek_v3"), tool("green"), call("deepseek_v3"), tool("blue")]
    )
    output = "<｜tool▁output▁begin｜>{}<｜tool▁output▁end｜>"
    begin, over = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
    calls = text.removeprefix("<｜tool▁calls▁begin｜>")
    prompt = tokenizer.chat_template.render([QUESTION])
    first, second = (f"{begin}{output.format(word)}{over}" for word in ("green", "blue"))
    assert tokenizer.backend.decode(ids, skip_special_tokens=False) == f"{prompt}{text}{end}{first}{text}{end}{second}"
    assert rendered == f"{prompt}{text}{end}{begin}{output.format('green')}\n{calls}{end}{output.format('blue')}{over}"


def test_a_template_that_moves_its_tools_keeps_them_where_they_were() -> None:
    tokenizer = load("mistral_nemo")

    ids = put_together(tokenizer, [("Green.", [user("And the sky?")])], TOOLS, "</s>")

    rendered = tokenizer.chat_template.render([QUESTION, answer("Green."), user("And the sky?")], TOOLS)
    [tools] = re.findall(r"\[AVAILABLE_TOOLS\].*\[/AVAILABLE_TOOLS\]", rendered)
    text = tokenizer.backend.decode(ids, skip_special_tokens=False)
    assert text.startswith(f"<s>{tools}[INST]")
    assert text.replace(tools, "") == rendered.replace(tools, "")


def test_a_variable_of_the_template_is_that_of_the_generation_prompt() -> None:
    tokenizer = load("qwen3", enable_thinking=False)

    reply = TurnTokens(tokenizer, 1024).reply([user("?")], last_token=tokenizer.eos_token_ids[0])

    end = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.backend.decode(reply.tolist(), skip_special_tokens=False).endswith(end)


def test_a_turn_that_ended_with_another_end_token_is_not_ended_again() -> None:
    for name in ("qwen2_5", "llama3_1"):
        tokenizer = load(name)
        turn_tokens = TurnTokens(tokenizer, 1024)
        replies = [turn_tokens.reply([user("?")], last_token=token).tolist() for token in tokenizer.eos_token_ids]
        assert all(reply == replies[0] for reply in replies)


def test_a_role_that_a_turn_should_have_begun_is_written() -> None:
    tokenizer = load("glm4_5")
    reply = TurnTokens(tokenizer, 1024).reply([tool("green")], last_token=tokenizer.backend.token_to_id("<|user|>"))

    text = tokenizer.backend.decode(np.asarray(reply).tolist(), skip_special_tokens=False)
    assert text.startswith("<|observation|>\n<tool_response>\ngreen")


def test_templates_without_tools_are_told() -> None:
    with pytest.raises(ValueError, match=r"^the chat template refuses the messages: Conversation roles must alternate"):
        TurnTokens(load("gemma2"), 1024).check("tool")
    for name in FAMILIES:
        TurnTokens(load(name), 1024).check("user")
    for name in WITH_TOOLS:
        TurnTokens(load(name), 1024).check("tool")
