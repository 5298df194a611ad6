"""Parses the test cases of a data set row, finds the program in a response, and compares outputs."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal

# stdin: the program reads its input and prints. call: a function or a method of `Solution` is called. asserts:
# statements run after the program.
Kind = Literal["stdin", "call", "asserts"]

# Possessive quantifiers, and thoughts only up to the last </think>: so the time is linear in the length of a response.
_FENCE = re.compile(r"```[ \t]*+(\w*+)[^\n`]*+\n(.*?)(?:```|\Z)", re.DOTALL)
_THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL | re.IGNORECASE)
_END_OF_THOUGHTS = re.compile(r"</think>", re.IGNORECASE)
# Words, and the line breaks of str.splitlines.
_TOKEN = re.compile(r"\S+|\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
# A right output may be larger than the expected one: it may have more decimals and more white space.
_TEXT_FACTOR, _JSON_FACTOR, _SLACK_BYTES = 8, 2, 1 << 16
_EXPECTED = 'expected JSON {"inputs": [...], "outputs": [...]}, {"functional": "..."} or a list of asserts'


@dataclass(frozen=True)
class Cases:
    """The test cases of one row of the data set.

    Attributes:
        inputs: one entry per test: text for kind stdin, the list of arguments for call, statements for asserts.
        expected: the right output of each test: text for stdin, a JSON value for call; empty for asserts.
        fn_name: the function that is called, for call.
    """

    kind: Kind
    inputs: tuple[Any, ...]
    expected: tuple[Any, ...] = ()
    fn_name: str = ""

    @cached_property
    def max_output_bytes(self) -> int:
        """The largest size in bytes that a right output of any test can have; larger outputs are wrong."""
        if self.kind == "call":
            return _JSON_FACTOR * max(len(json.dumps(value)) for value in self.expected) + _SLACK_BYTES
        sizes = (len(text.encode(errors="replace")) for text in self.expected)
        return _TEXT_FACTOR * max(sizes, default=0) + _SLACK_BYTES

    def is_passed(self, index: int, output: bytes, nonce: str) -> bool:
        """Returns True if an output is right for test number `index`; for asserts the right output is the nonce."""
        text = output.decode(errors="replace")
        if self.kind == "asserts":
            return text == nonce
        if self.kind == "stdin":
            return is_same_text(text, self.expected[index])
        try:
            return is_same_value(json.loads(text), self.expected[index])
        except (ValueError, RecursionError):
            return False


def parse_cases(ground_truth: Any) -> Cases:
    """Parses the test cases in a row's `reward_model.ground_truth`, which is JSON or already parsed.

    Accepts {"inputs", "outputs"} with or without "fn_name" (APPS, TACO, PRIME), {"functional": code}, {"assert_case":
    [code, ...]}, and a list of asserts.

    Raises:
        ValueError: the ground truth has none of these forms; one sentence.
    """
    tests = ground_truth
    if isinstance(tests, str | bytes):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{_EXPECTED}, got {ground_truth!r:.80}") from error
    if isinstance(tests, Mapping) and "inputs" in tests:
        return _pairs(tests)
    if isinstance(tests, Mapping) and (code := tests.get("functional") or tests.get("assert_case")):
        tests = [code] if isinstance(code, str) else code
    if not isinstance(tests, list) or not tests or not all(isinstance(statements, str) for statements in tests):
        raise ValueError(f"{_EXPECTED}, got {ground_truth!r:.80}")
    return Cases("asserts", tuple(tests))


def _pairs(tests: Mapping[str, Any]) -> Cases:
    """Parses test cases given as lists `inputs` and `outputs`; ValueError if the lists do not fit together."""
    inputs, outputs, fn_name = tests["inputs"], tests.get("outputs"), tests.get("fn_name") or ""
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"{_EXPECTED} with as many outputs as inputs and at least one, got {tests!r:.80}")
    if not fn_name:
        return Cases("stdin", tuple(map(_lines, inputs)), tuple(map(_lines, outputs)))
    try:
        arguments = tuple(map(_arguments, inputs))
        expected = tuple(json.loads(output) if isinstance(output, str) else output for output in outputs)
    except ValueError as error:
        raise ValueError(f"expected JSON in the inputs and outputs of fn_name {fn_name!r}: {error}") from error
    return Cases("call", arguments, expected, str(fn_name))


def _arguments(entry: Any) -> list[Any]:
    """Parses the arguments of one function call, given as lines of JSON or as a list."""
    if isinstance(entry, str):
        return [json.loads(line) for line in entry.split("\n")]
    if not isinstance(entry, list):
        raise ValueError(f"expected a list of arguments, got {entry!r:.80}")
    return entry


def _lines(entry: Any) -> str:
    return "\n".join(map(str, entry)) if isinstance(entry, list) else str(entry)


def program_of(response: str) -> str | None:
    """Finds the program in a response: the last fenced block of Python, else the last fenced block, else all text.

    Text between <think> and </think> is left out. A block that is not closed goes to the end of the response. Returns
    None if the program is empty.
    """
    end = max((match.end() for match in _END_OF_THOUGHTS.finditer(response)), default=0)
    answer = _THOUGHTS.sub("", response[:end]) + response[end:]
    blocks = _FENCE.findall(answer)
    ours = [code for language, code in blocks if language.lower() in ("python", "python3", "py")]
    program = (ours or [code for _, code in blocks] or [answer])[-1]
    return program if program.strip() else None


def is_same_text(output: str, expected: str) -> bool:
    """Compares an output with the expected output line by line; white space and the spelling of decimals do not count.

    If the expected word is a decimal such as 0.50 or 1e-3, a number within 1e-5 of it, relatively, is equal to it. If
    the expected decimal is 0.0, a number within 1e-8 of it is equal.
    """
    ours, theirs = output.strip(), expected.strip()
    return ours == theirs or all(
        _is_same_word(word, other) for word, other in zip_longest(_tokens(ours), _tokens(theirs), fillvalue="")
    )


def _tokens(text: str) -> Iterator[str]:
    return ("\n" if match[0].isspace() else match[0] for match in _TOKEN.finditer(text))


def _is_same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if not any(mark in expected for mark in ".eE"):
        return False
    try:
        number = float(expected)
        return math.isclose(float(word), number, rel_tol=1e-5, abs_tol=0.0 if number else 1e-8)
    except ValueError:
        return False


def is_same_value(value: Any, expected: Any) -> bool:
    """Returns True if a call's return value equals the expected JSON value, or the only entry of an expected list.

    Data sets in the form of APPS put the expected value into a list of one entry.
    """
    stands_for = expected[0] if isinstance(expected, list) and len(expected) == 1 else expected
    return _is_same_json(value, expected) or _is_same_json(value, stands_for)


def _is_same_json(value: Any, expected: Any) -> bool:
    """Returns True if two JSON values are equal; 1 equals 1.0, but 1 does not equal true."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_is_same_json, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_is_same_json(value[key], expected[key]) for key in expected)
    return isinstance(value, bool) is isinstance(expected, bool) and bool(value == expected)
