"""Calls of tools, whatever is in their arguments and around them: each comes back as it was written, or as an error."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import environments.tool_calls
from benchmarks.tool_calls import MARKS
from environments.loading import load_parser
from environments.schemas import JSON_TYPES

LIMIT_S = 2  # of CPU time; a parser that looks back and forth takes 6 s and more

_PIECES = (
    *("<tool_call>", "</tool_call>", "</function>", "</parameter>", "<function=", "<parameter=b>"),
    *("{", "}", '"', "'", "\\", ";", ":", "[", "\n", " ", "name", '{"q": "x"}', "{1, 2}", "<|python_tag|>", "é\u2028"),
)
PROSE = st.lists(st.sampled_from(_PIECES), max_size=6).map("".join)
THOUGHT = st.just("") | PROSE.map(lambda text: f"<think>{text}</think>\n")
TEXT = st.lists(st.sampled_from((*_PIECES, "</think>", "<think>", "\ud800")), max_size=8).map("".join) | st.text(
    max_size=5
)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.sampled_from("abc"), VALUE, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from("fg"), ARGUMENTS), min_size=1, max_size=3)
# A value of qwen3_coder that ends as the format does is no other text than two parameters, or calls.
_ENDS_VALUE = re.compile(
    r"^</parameter>\s*(<parameter=|</function>\s*(</tool_call>|<tool_call>|<function=|$))", re.MULTILINE
)


def in_hermes(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def in_llama3_json(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "parameters": arguments})


def in_qwen3_coder(name: str, arguments: dict[str, Any]) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


FORMATS = pytest.mark.parametrize(
    ("tool_format", "write"), [("hermes", in_hermes), ("llama3_json", in_llama3_json), ("qwen3_coder", in_qwen3_coder)]
)


def schemas_of(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Schemas by which each value has the type that it has."""

    def types(name: str, key: str) -> list[str]:
        values = [arguments[key] for called, arguments in calls if called == name and key in arguments]
        return [JSON_TYPES.get(type(value), "object") for value in values]

    return [
        {"function": {"name": name, "parameters": {"properties": {key: {"type": types(name, key)} for key in "abc"}}}}
        for name in "fg"
    ]


def one_of_each(
    calls: Sequence[tuple[str, dict[str, Any]]], is_kept: Callable[[Any], bool]
) -> list[tuple[str, dict[str, Any]]]:
    """One call of each tool, with some of its arguments."""
    return [
        (name, {key: value for key, value in arguments.items() if is_kept(value)})
        for name, arguments in dict(calls).items()
    ]


def is_clear(value: Any) -> bool:
    """Whether qwen3_coder can say the value."""
    return not (isinstance(value, str) and _ENDS_VALUE.search(f"{value}\n</parameter>"))


def is_sound(value: Any) -> bool:
    """Whether UTF-8 can say the value."""
    return "\\ud800" not in repr(value)


@FORMATS
@given(calls=CALLS, prose=st.lists(PROSE, min_size=4, max_size=4), thought=THOUGHT)
@settings(max_examples=300)
def test_a_call_comes_back_as_it_was_or_as_an_error(tool_format, write, calls, prose, thought) -> None:
    if tool_format == "qwen3_coder":
        calls = one_of_each(calls, is_clear)
    texts = [write(*call) + between for call, between in zip(calls, prose, strict=False)]
    before, found = load_parser(tool_format)(thought + prose[-1] + "".join(texts), schemas_of(calls))
    assert before.startswith(thought)
    made = [(call.name, call.arguments) for call in found if not call.error]
    # repr also tells 1 from True, and 0.0 from -0.0
    written = iter(map(repr, calls))
    assert all(repr(call) in written for call in made), "a call that was not written so"
    assert len(made) == len(calls) or len(found) > len(made), "a call is lost without an error"


@FORMATS
@given(calls=CALLS)
def test_calls_without_prose_come_back_without_an_error(tool_format, write, calls) -> None:
    def plain(value: Any) -> bool:
        return is_sound(value) and (tool_format != "qwen3_coder" or not re.search("^<", str(value), re.MULTILINE))

    calls = one_of_each(calls, plain)
    _, found = load_parser(tool_format)("\n".join(write(*call) for call in calls), schemas_of(calls))
    assert repr([(call.name, call.arguments) for call in found]) == repr(calls)


def test_every_parser_is_tried() -> None:
    (folder,) = environments.tool_calls.__path__
    assert set(MARKS) == {path.stem for path in Path(folder).glob("*.py") if "\ndef parse(" in path.read_text()}


@pytest.mark.slow
def test_no_repeated_marks_of_128_kb_keep_a_parser_busy() -> None:
    command = [sys.executable, "-m", "benchmarks.tool_calls", "--limit-s", str(LIMIT_S)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    last_turn = finished.stdout[-200:]
    assert finished.returncode == 0, f"{last_turn}\n{finished.stderr[-1000:]}"
