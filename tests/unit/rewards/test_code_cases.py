"""Code answers without a sandbox: the program in a response, the tests of a row, and what counts as the same output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rewards.code.cases import Cases, is_same_text, parse_cases, program_of
from rewards.code.seccomp import filter_program


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("first ```python\na\n``` then\n```py\nb\n``` end", "b\n"),
        ("```python\nb\n```\nIt prints:\n```\n42\n```", "b\n"),
        ("```\nc\n```", "c\n"),
        ("```python\ncut off", "cut off"),
        ("<think>```python\ndraft\n```</think> The answer: ```python\nfinal\n```", "final\n"),
        ("print(1)", "print(1)"),
        (" \n", None),
        ("```python\n```", None),
    ],
)
def test_the_program_is_the_last_fenced_block_of_python(response: str, program: str | None) -> None:
    assert program_of(response) == program


@pytest.mark.parametrize(
    ("ground_truth", "cases"),
    [
        ({"inputs": ["1\n", "2\n"], "outputs": ["a", "b"]}, Cases("stdin", ("1\n", "2\n"), ("a", "b"))),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, Cases("stdin", ("1\n2",), ("3",))),
        ({"inputs": ["1\n[2]"], "outputs": ["3"], "fn_name": "f"}, Cases("call", ([1, [2]],), (3,), "f")),
        ({"inputs": [[1, [2]]], "outputs": [[3]], "fn_name": "f"}, Cases("call", ([1, [2]],), ([3],), "f")),
        ({"inputs": ["1"], "outputs": ["2"], "fn_name": None}, Cases("stdin", ("1",), ("2",))),
        ({"functional": "assert f(1) == 2"}, Cases("asserts", ("assert f(1) == 2",))),
        ({"assert_case": ["assert f(1)", "assert f(2)"]}, Cases("asserts", ("assert f(1)", "assert f(2)"))),
        (["assert f(1)"], Cases("asserts", ("assert f(1)",))),
    ],
)
def test_test_cases_are_read_as_verls_code_sets_have_them(ground_truth: Any, cases: Cases) -> None:
    assert parse_cases(ground_truth) == cases
    assert parse_cases(json.dumps(ground_truth)) == cases


@pytest.mark.parametrize(
    "ground_truth",
    [
        "42 apples",
        "42",
        None,
        [],
        {},
        [1],
        {"inputs": ["1"]},
        {"inputs": [], "outputs": []},
        {"inputs": ["1"], "outputs": []},
    ],
)
def test_what_holds_no_test_cases_is_refused_with_what_was_expected(ground_truth: Any) -> None:
    with pytest.raises(ValueError, match=r'expected JSON \{"inputs".*got '):
        parse_cases(ground_truth)


def test_arguments_that_are_no_json_are_refused_with_the_functions_name() -> None:
    with pytest.raises(ValueError, match="expected JSON in the inputs and outputs of fn_name 'f'"):
        parse_cases({"inputs": ["one"], "outputs": ["2"], "fn_name": "f"})


@pytest.mark.parametrize(
    ("output", "expected", "is_same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        (" 1  2 \n3", "1 2\n3\n\n", True),
        ("1\n2 3", "1 2\n3", False),
        ("0.333333", "0.33333333", True),
        ("0.34", "0.33333333", False),
        ("1", "1.0", True),
        ("1.0", "1", False),
        ("10000001", "10000002", False),
        ("x.y", "x.z", False),
        ("nan", "nan.", False),
        ("", "0", False),
    ],
)
def test_output_is_compared_by_line_and_word_and_decimals_by_value(output: str, expected: str, is_same: bool) -> None:
    assert is_same_text(output, expected) is is_same


@pytest.mark.parametrize(
    ("value", "is_passed"), [("[1, 2]", True), ("[[1, 2]]", False), ("[1, 2", False), ("", False), ("[2, 1]", False)]
)
def test_a_call_passes_with_the_expected_value_or_the_one_entry_of_a_list(value: str, is_passed: bool) -> None:
    cases = parse_cases({"inputs": ["1", "1"], "outputs": ["[1, 2]", "[[1, 2]]"], "fn_name": "f"})
    assert cases.is_passed(0, value.encode(), nonce="") is is_passed
    assert cases.is_passed(1, value.encode(), nonce="") is (is_passed or value == "[[1, 2]]")


def test_there_is_a_filter_for_both_machines_and_none_for_others() -> None:
    assert filter_program("x86_64") != filter_program("aarch64")
    with pytest.raises(ValueError, match="no filter of system calls for riscv64, only for x86_64 and aarch64"):
        filter_program("riscv64")
