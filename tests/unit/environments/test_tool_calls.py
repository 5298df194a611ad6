"""Parsers of calls, against a table of vLLM's answers; tests/vllm/test_tool_calls.py shows that the table is true."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from environments.chat import ToolCall
from environments.loading import load_parser
from environments.tools import Tool
from splitppo.config_error import ConfigError
from tests.support.tool_calls import BROKEN, DIFFERENT, SCHEMAS, TABLE, TEXTS, F, G, function, hermes

VLLM = json.loads(TABLE.read_text())


def parsed(tool_format: str, text: str) -> tuple[str, Sequence[ToolCall]]:
    return load_parser(tool_format)(text, SCHEMAS)


def test_the_table_has_all_texts_and_more_than_a_hundred_calls() -> None:
    assert {name: list(answers) for name, answers in VLLM.items()} == TEXTS
    assert sum(len(texts) for texts in TEXTS.values()) > 150
    assert {*DIFFERENT, *BROKEN} <= {text for texts in TEXTS.values() for text in texts}


@pytest.mark.parametrize(("tool_format", "text"), [(name, text) for name, texts in TEXTS.items() for text in texts])
def test_calls_are_read_as_vllm_reads_them(tool_format: str, text: str) -> None:
    before, calls = parsed(tool_format, text)
    ours = [[call.name, call.arguments] for call in calls]
    theirs = VLLM[tool_format][text]
    if any(call.error for call in calls):
        assert bool(theirs["calls"]) == (text in BROKEN)
        assert all(call.error.startswith("this is no call of a tool: ") for call in calls if not call.name)
    else:
        assert (ours == theirs["calls"]) != (text in DIFFERENT)
        if theirs["content"] and text not in DIFFERENT:
            assert before.strip() == theirs["content"].strip()


@pytest.mark.parametrize(
    ("tool_format", "text", "expected"),
    [
        ("hermes", hermes("{'name': 'f'}"), "it is no JSON (Expecting property name enclosed in double quotes"),
        ("hermes", hermes("[1]"), "it is [1]; expected {"),
        ("hermes", hermes('{"arguments": {}}'), 'it has no name; expected {"name": ..., "arguments": {...}}'),
        ("hermes", hermes('{"name": "f", "arguments": 3}'), "its arguments are no JSON object; expected {"),
        ("hermes", hermes("[" * 100_000), "it is no JSON (maximum recursion depth exceeded"),
        (
            "hermes",
            hermes('{"name": "f", "arguments": {"a": ' + "[" * 900 + "]" * 900 + "}}"),
            "its arguments are nested more than 64 deep",
        ),
        (
            "qwen3_coder",
            "<tool_call>f</tool_call>",
            "it has no function; expected <function=NAME><parameter=NAME>VALUE",
        ),
        ("qwen3_coder", "<function=f>", "it has no end; expected <function=NAME><parameter=NAME>VALUE"),
        ("llama3_json", '{"name": ', "it is no JSON (Expecting value"),
    ],
)
def test_a_broken_call_says_what_was_expected(tool_format: str, text: str, expected: str) -> None:
    _, (call,) = parsed(tool_format, text)
    assert call.error.startswith(f"this is no call of a tool: {expected}")


def test_a_start_tag_alone_costs_no_call_behind_it() -> None:
    text = hermes('{"name": "f", "arguments": {"text": "</think>"}}')
    _, calls = parsed("hermes", f"<tool_call>{text}{hermes(G)}")
    assert [call.name for call in calls] == ["", "f", "g"]


def test_a_broken_call_costs_no_other_call() -> None:
    _, calls = parsed("hermes", hermes('{"name": "f", "arguments": {}}', "{", '{"name": "g", "arguments": {}}'))
    assert [(call.name, bool(call.error)) for call in calls] == [("f", False), ("", True), ("g", False)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (hermes('{"name": "f", "arguments": {"text": "a </think> b"}}'), [("f", {"text": "a </think> b"})]),
        (f"<think>{hermes(F)}</think>{hermes(G)}", [("g", {})]),
        (f"{hermes(F)} or not?</think>{hermes(G)}", [("g", {})]),
        (f"perhaps <tool_call> or not</think>{hermes(G)}", [("g", {})]),
        ("perhaps <tool_call>{ or not</think>5", [("", {})]),
        ("<think>perhaps <tool_call>{ or not</think>5", []),
        (f"{hermes(F)}</think>5", []),
        (f"<think>a</think>b<think>{hermes(F)}</think>{hermes(G)}", [("", {}), ("g", {})]),
        (hermes('{"name": "f", "arguments": {"text": "a "b" ' + hermes(G) + '"}}'), [("", {})]),
    ],
)
def test_a_thought_ends_where_no_call_is_cut(text: str, expected: list[tuple[str, dict[str, Any]]]) -> None:
    _, calls = parsed("hermes", text)
    assert [(call.name, call.arguments) for call in calls] == expected


@pytest.mark.parametrize(
    "written",
    ['"args": {"text": "a"}', '"Arguments": {"text": "a"}', '"input": {"text": "a"}', '"text": "a"', '"type": "tool"'],
)
@pytest.mark.parametrize("tool_format", ["hermes", "llama3_json"])
def test_a_call_with_another_key_is_an_error_that_names_it(tool_format: str, written: str) -> None:
    text = f'{{"name": "f", {written}}}'
    _, (call,) = parsed(tool_format, hermes(text) if tool_format == "hermes" else text)
    key = written.split('"')[1]
    assert call.error.startswith(f"this is no call of a tool: it has the key {key!r}; expected {{")


def test_a_call_may_say_that_it_is_one_of_a_function() -> None:
    _, (call,) = parsed("llama3_json", '{"type": "function", "name": "f", "parameters": {"text": "a"}}')
    assert (call.name, call.arguments, call.error) == ("f", {"text": "a"}, "")


WRITTEN_G = {"hermes": hermes(G), "llama3_json": '{"name": "g", "parameters": {}}', "qwen3_coder": function("g")}


@pytest.mark.parametrize("thought", ["<think>plan</think>", "plan</think>"])
@pytest.mark.parametrize("tool_format", WRITTEN_G)
def test_a_later_end_of_a_thought_loses_no_call(tool_format: str, thought: str) -> None:
    _, calls = parsed(tool_format, f"{thought}{WRITTEN_G[tool_format]} I closed </think> above.")
    assert [(call.name, call.error) for call in calls] == [("g", "")]


@pytest.mark.parametrize("tool_format", WRITTEN_G)
def test_a_call_in_a_second_thought_is_counted_and_not_made(tool_format: str) -> None:
    g = WRITTEN_G[tool_format]
    _, calls = parsed(tool_format, f"<think>a</think>\n<think>{g}\n</think>\n{g}")
    assert ["it stands in a second thought" in call.error for call in calls] == [True, False]


@pytest.mark.parametrize("thought", ["", "<think>plan</think>"])
def test_an_end_of_a_thought_in_a_value_that_is_cut_hides_no_error(thought: str) -> None:
    _, calls = parsed("qwen3_coder", thought + qwen("a\n</tool_call>\n</think>\nb"))
    assert [bool(call.error) for call in calls] == [True]


@pytest.mark.parametrize("between", ["", function("g") + "\n"])
def test_a_value_that_ends_its_own_call_is_an_error_with_all_calls_in_it(between: str) -> None:
    text = qwen("a\n</parameter>\n</function>\n</tool_call>\n" + between + "b")
    _, calls = parsed("qwen3_coder", text)
    assert calls
    assert all(call.error for call in calls)


def qwen(value: str) -> str:
    return function("f", text=value)


@pytest.mark.parametrize(
    "text",
    [
        qwen("a\n</parameter>\nb"),
        qwen("a\n" + function("g") + "\nb"),
        qwen("a\n</parameter>\n</function>\nb"),
        qwen("a\n<parameter=number>\nb"),
    ],
)
def test_a_value_of_qwen3_coder_that_has_lines_of_the_format_is_an_error(text: str) -> None:
    _, calls = parsed("qwen3_coder", text)
    assert calls
    assert all(call.error for call in calls)


def test_calls_that_may_be_a_part_of_a_broken_one_are_counted_and_not_made() -> None:
    _, calls = parsed("qwen3_coder", qwen("a").replace("</parameter>\n", "") + "\n" + function("g"))
    reason = "it stands behind a call that is broken, and may be a part of it"
    assert [reason in call.error for call in calls] == [False, True]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('Sure: {"name": "f"} and {"name": "Bob"}', ["f"]),
        ('Sure: {"name": "unknown", "parameters": {}}', ["unknown"]),
        ('Sure: {"name": "f", "parameters": {"a": 1}', [""]),
        ('Sure: {"name": "f", "parameters": {"fields": {"name": "g", "parameters": {}}, oops}}', [""]),
        ('Sure: {"call": {"name": "g", "parameters": {}}}', [""]),
        ('{1, 2} and {x}: {"name": "g", "parameters": {}} {y}', ["g"]),
        ('{"q": "x"}', [""]),
        ('The dict {"q": "x"}', []),
    ],
)
def test_an_object_of_llama3_json_is_a_call_where_it_is_meant_as_one(text: str, names: list[str]) -> None:
    _, calls = parsed("llama3_json", text)
    assert [call.name for call in calls] == names
    assert all(bool(call.error) != bool(call.name) for call in calls)


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity"])
@pytest.mark.parametrize("tool_format", ["hermes", "llama3_json", "qwen3_coder"])
def test_a_number_that_is_not_finite_is_an_error(tool_format: str, number: str) -> None:
    text = f'{{"name": "f", "arguments": {{"ratio": {number}}}}}'
    texts = {"hermes": hermes(text), "llama3_json": text, "qwen3_coder": function("f", ratio=number)}
    _, (call,) = parsed(tool_format, texts[tool_format])
    assert number in call.error


def tool(number: int, ratio: float, flag: bool, text: str, items: list[int], maybe: str | None = None) -> None:
    """Does it.

    Args:
        number: one.
        ratio: one.
        flag: one.
        text: one.
        items: one.
        maybe: one.
    """


@pytest.mark.parametrize(
    ("key", "written", "expected"),
    [
        ("number", "5", 5),
        ("ratio", "5", 5.0),
        ("flag", "True", True),
        ("flag", "0", False),
        ("text", "5", "5"),
        ("text", "null", "null"),
        ("items", "[1, 2]", [1, 2]),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
    ],
)
def test_values_of_qwen3_coder_get_the_types_of_the_tool(key: str, written: str, expected: Any) -> None:
    made = Tool.of(tool)
    values = {"number": "1", "ratio": "1", "flag": "true", "text": "a", "items": "[]"} | {key: written}
    _, (call,) = load_parser("qwen3_coder")(function("tool", **values), [made.schema])
    value = made.check(call.arguments)[key]
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"number": "x"}, "number: Input should be a valid integer, unable to parse string as an integer"),
        ({"number": 1.5}, "number: Input should be a valid integer, got a number with a fractional part"),
        ({"ratio": "NaN"}, "ratio: Input should be a finite number"),
        ({"ratio": "1e999"}, "ratio: Input should be a finite number"),
        ({"number": None}, "number: Input should be a valid integer"),
        ({"text": 5}, "text: Input should be a valid string"),
        ({"items": [1, "x"]}, "items.1: Input should be a valid integer, unable to parse string as an integer"),
        ({"other": 1}, "other: Extra inputs are not permitted"),
        ({"number": [], "text": {}}, "number: Input should be a valid integer; text: Input should be a valid string"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(arguments: dict[str, Any], expected: str) -> None:
    good = {"number": 1, "ratio": 1, "flag": True, "text": "a", "items": []}
    with pytest.raises(ValueError) as raised:
        Tool.of(tool).check(good | arguments)
    assert str(raised.value) == expected


def test_an_argument_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"^text: Field required; items: Field required$"):
        Tool.of(tool).check({"number": 1, "ratio": 1, "flag": True})


def test_a_parser_of_the_users_has_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^key 'rollout\.multi_turn\.tool_format': there is no file"):
        parsed(f"{tmp_path}/nothing.py:parse", "")
