"""Code answers without a sandbox: the program in a response, the tests of a row, and equal outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.code.cases import Cases, is_same_text, parse_cases, program_of
from rewards.code.frames import Frames
from rewards.code.seccomp import filter_program
from tests.support.groups import PROJECT


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
        ("1. So:\n   ```python\n   if x:\n       y()\n\n   z()\n   ```\n", "if x:\n    y()\n\nz()\n"),
        ("- ```python\n  if x:\n      y()\n  ```\n", "if x:\n    y()\n"),
        ("\t```python\n\tif x:\n\t\ty()\n\t```\n", "if x:\n\ty()\n"),
        ("  ```python\nif x:\n  y()\n  ```\n", "if x:\n  y()\n"),
        ("so ```python\n  a\n```", "  a\n"),
        ('```python\ns = "```"\nt = 1\n```\n', 's = "```"\nt = 1\n'),
        ("```python\ns = '\\'```'\nt = 1\n```\n", "s = '\\'```'\nt = 1\n"),
        ('```python\ns = """\n```\nx\n```\n"""\nt = 1\n```\nend', 's = """\n```\nx\n```\n"""\nt = 1\n'),
        ("```python\na = 1  # not ```\nb\n```", "a = 1  # not ```\nb\n"),
        ("````python\nx\n```\ny\n````", "x\n```\ny\n"),
        ("~~~python\nx\n~~~\nend", "x\n"),
        ("```python\nprint(1)```\nend", "print(1)"),
        ("```\nIt's `so`\n```\n```python\nb\n```", "b\n"),
        ('```python\n"""open\n```\nNo:\n```python\n"""doc"""\nb\n```', '"""doc"""\nb\n'),
        ("```python\na\n```python\nb\n```", "b\n"),
        ("```python\r\na\r\n```\r\n", "a\r\n"),
        ("```py3\na\n```\n```\n5\n```", "a\n"),
        ("```pypy3\na\n```\n```\n5\n```", "a\n"),
    ],
)
def test_the_program_is_the_last_fenced_block_of_python(response: str, program: str | None) -> None:
    assert program_of(response) == program


FRAGMENTS = r"""
import itertools, math, resource, time
from rewards.code.cases import program_of

marks = ("<think>", "</think>", "```", "```python", "`", "\n", " ", "a", "\'", "\'\'\'", "#", "\\", "~~~", "")
for mark, then, start in itertools.product(marks, marks, ("", "```\n")):
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + 2), resource.RLIM_INFINITY))
    program_of(start + (mark + then) * (131072 // max(1, len(mark + then))))
"""


@pytest.mark.slow
def test_the_program_in_128_kb_of_repeated_marks_is_found_in_linear_time() -> None:
    # 2 s of the CPU for each; one took 8 s where a search began anew at every mark.
    done = subprocess.run([sys.executable, "-c", FRAGMENTS], cwd=PROJECT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


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
        ({"inputs": None, "outputs": None, "functional": "assert f(1)"}, Cases("asserts", ("assert f(1)",))),
        ({"inputs": ["1"], "outputs": ["2"], "functional": None}, Cases("stdin", ("1",), ("2",))),
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
        {"inputs": None, "outputs": None},
        {"inputs": ["1", None], "outputs": ["1", "2"]},
        {"inputs": ["1", "2"], "outputs": ["1", None]},
        {"inputs": [["1", None]], "outputs": ["1"]},
        {"functional": ["assert f(1)", None]},
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
        ("1.0", "1", True),
        ("2.9999999", "3", True),
        ("-0.0", "0", True),
        ("4 5.0", "4 5", True),
        ("3.1", "3", False),
        ("1000001.0", "1000000", False),
        ("1e400", "1000000", False),
        ("1.2345678901234567e19", "12345678901234567890", False),
        ("1_000.0", "1000", False),
        ("0x10", "16", False),
        ("inf", "1e400", False),
        ("0.3000000000000001e1", "3", True),
        ("0", "0.00000000123", True),
        ("0.0000001", "0.00000000123", False),
        ("1e99999999999999999999", "1.0", False),
        ("1.23e-9", "0.00000000123", True),
        ("0.000000001", "0.0", True),
        ("0.001", "0.0", False),
        ("1\n\n2", "1\n2", False),
        ("1\u20282\r\n3", "1\n2\x0c3", True),
        ("10000001", "10000002", False),
        ("x.y", "x.z", False),
        ("nan", "nan.", False),
        ("", "0", False),
    ],
)
def test_output_is_compared_by_line_and_word_and_decimals_by_value(output: str, expected: str, is_same: bool) -> None:
    assert is_same_text(output, expected) is is_same


@pytest.mark.parametrize(
    ("value", "expected", "is_passed"),
    [
        ("[1, 2]", "[1, 2]", True),
        ("[2, 1]", "[1, 2]", False),
        ("[1, 2", "[1, 2]", False),
        ("", "[1, 2]", False),
        ("[1, 2]", "[[1, 2]]", True),
        ("[[1, 2]]", "[[1, 2]]", True),
        ("[[1, 2]]", "[1, 2]", False),
        ("0", "[0, 1]", False),
        ("[]", "[[], [1], [2], [1, 2]]", False),
        ("1.0", "1", True),
        (repr(0.1 + 0.2), "0.3", True),
        ("[0.30000000000000004, 1.0]", "[0.3, 1.0]", True),
        ('{"mean": 0.7999999999999999}', '{"mean": 0.8}', True),
        ("2.0000000001", "2", True),
        ("2.001", "2", False),
        ("0.31", "0.3", False),
        ("1000001.0", "1000000", False),
        ("9007199254740993", "9007199254740992", False),
        ("NaN", "0.5", False),
        ("true", "1.0", False),
        ("9" * 5000, "9" * 5000, True),
        ("9" * 5000, "9" * 4999 + "8", False),
        ("9" * 5000, "1.5", False),
        ("true", "1", False),
        ("1", "true", False),
        ('{"a": [1]}', '{"a": [1.0]}', True),
        ('{"a": [true]}', '{"a": [1]}', False),
        ("[" * 900 + "]" * 900, "[]", False),
    ],
)
def test_a_call_passes_with_the_expected_value_or_the_one_entry_of_a_list(
    value: str, expected: str, is_passed: bool
) -> None:
    cases = parse_cases({"inputs": ["1"], "outputs": [expected], "fn_name": "f"})
    assert cases.is_passed(0, value.encode(), nonce="") is is_passed


@pytest.mark.parametrize(
    ("ground_truth", "output"),
    [
        ({"inputs": ["", ""], "outputs": ["1 " * 10**5, ""]}, "\n" + "1 \t  " * 10**5 + "\n" * 10**4),
        ({"inputs": [""], "outputs": ["0.5 " * 10**5]}, "0.50000000000000000 " * 10**5),
        ({"inputs": ["1"], "outputs": [[["é"] * 10**5]], "fn_name": "f"}, json.dumps(["é"] * 10**5, indent=1)),
    ],
)
def test_what_is_right_however_it_is_spaced_is_not_larger_than_an_output_may_be(ground_truth: Any, output: str) -> None:
    cases = parse_cases(ground_truth)
    assert cases.is_passed(0, output.encode(), nonce="")
    assert len(output.encode()) <= cases.max_output_bytes < len(output.encode()) * 10


def test_there_is_a_filter_for_both_machines_and_none_for_others() -> None:
    assert filter_program("x86_64") != filter_program("aarch64")
    with pytest.raises(ValueError, match="no filter of system calls for riscv64, only for x86_64 and aarch64"):
        filter_program("riscv64")


@given(st.lists(st.binary(max_size=200), max_size=5), st.integers(1, 300), st.integers(0, 200))
def test_frames_come_out_as_they_went_in_however_the_pipe_cuts_them_but_for_those_too_large(
    outputs: list[bytes], chunk_bytes: int, max_bytes: int
) -> None:
    sent = b"".join(b"ok %d\n%s" % (len(output), output) for output in outputs)
    frames = Frames(max_bytes)
    chunks = [sent[start : start + chunk_bytes] for start in range(0, len(sent), chunk_bytes)]
    taken = [frame for chunk in chunks for frame in frames.feed(chunk)]
    assert taken == [("ok", output if len(output) <= max_bytes else None) for output in outputs]


def test_an_output_larger_than_it_may_be_is_refused_before_it_is_read() -> None:
    frames = Frames(max_bytes=9)
    assert list(frames.feed(b"ok 10\n")) == [("ok", None)]
    assert list(frames.feed(b"ok 9\n 4\n..")) == []
    assert list(frames.feed(b"error 0\n")) == [("error", b"")]


@pytest.mark.parametrize(
    "sent", [b"\n", b"ok -1\n", b"ok 1 2\n", b"ok\n", b"gone 1\n", b"ok " + b"9" * 5000, b"x" * 99]
)
def test_what_is_no_frame_is_an_error(sent: bytes) -> None:
    with pytest.raises(ValueError, match='expected "STATUS SIZE", got '):
        list(Frames(9).feed(sent))
