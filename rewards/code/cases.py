"""Test cases of a row, the program in a response, and whether what it gave is what was expected."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal

# stdin: a program reads its input and prints. call: a function or a method of `Solution` is called. asserts: statements
# that run behind the program.
Kind = Literal["stdin", "call", "asserts"]

# Possessive, and thoughts only up to the last end of some: the time they take is linear in a response.
_FENCE = re.compile(r"```[ \t]*+(\w*+)[^\n`]*+\n(.*?)(?:```|\Z)", re.DOTALL)
_THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL | re.IGNORECASE)
_END_OF_THOUGHTS = re.compile(r"</think>", re.IGNORECASE)
# Words, and the line breaks that str.splitlines knows.
_TOKEN = re.compile(r"\S+|\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
# Outputs that are right may be larger than what is expected: decimals are spelt out, and white space may be added.
_TEXT_FACTOR, _JSON_FACTOR, _SLACK_BYTES = 8, 2, 1 << 16
_EXPECTED = 'expected JSON {"inputs": [...], "outputs": [...]}, {"functional": "..."} or a list of asserts'


@dataclass(frozen=True)
class Cases:
    """The tests of one row.

    Attributes:
        inputs: one entry per test: text for stdin, the list of arguments for call, statements for asserts.
        expected: what each has to give: text, a JSON value; nothing for asserts.
        fn_name: what is called.
    """

    kind: Kind
    inputs: tuple[Any, ...]
    expected: tuple[Any, ...] = ()
    fn_name: str = ""

    @cached_property
    def max_output_bytes(self) -> int:
        """The size above which no output of a test can be right, however it is spaced."""
        if self.kind == "call":
            return _JSON_FACTOR * max(len(json.dumps(value)) for value in self.expected) + _SLACK_BYTES
        sizes = (len(text.encode(errors="replace")) for text in self.expected)
        return _TEXT_FACTOR * max(sizes, default=0) + _SLACK_BYTES

    def is_passed(self, index: int, output: bytes, nonce: str) -> bool:
        """Returns True if the output passes test number `index`; asserts give the nonce when all of them hold."""
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
    """The tests that a row's `reward_model.ground_truth` holds, as text or already parsed.

    Accepts {"inputs", "outputs"} with or without "fn_name" (APPS, TACO, PRIME), {"functional": code}, {"assert_case":
    [code, ...]}, and a list of asserts.

    Raises:
        ValueError: it is none of these, in one sentence.
    """
    found = ground_truth
    if isinstance(found, str | bytes):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{_EXPECTED}, got {ground_truth!r:.80}") from error
    if isinstance(found, Mapping) and "inputs" in found:
        return _pairs(found)
    if isinstance(found, Mapping) and (code := found.get("functional") or found.get("assert_case")):
        found = [code] if isinstance(code, str) else code
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        raise ValueError(f"{_EXPECTED}, got {ground_truth!r:.80}")
    return Cases("asserts", tuple(found))


def _pairs(found: Mapping[str, Any]) -> Cases:
    inputs, outputs, fn_name = found["inputs"], found.get("outputs"), found.get("fn_name") or ""
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"{_EXPECTED} with as many outputs as inputs and at least one, got {found!r:.80}")
    if not fn_name:
        return Cases("stdin", tuple(map(_lines, inputs)), tuple(map(_lines, outputs)))
    try:
        arguments = tuple(_arguments(one) for one in inputs)
        expected = tuple(json.loads(one) if isinstance(one, str) else one for one in outputs)
    except ValueError as error:
        raise ValueError(f"expected JSON in the inputs and outputs of fn_name {fn_name!r}: {error}") from error
    return Cases("call", arguments, expected, str(fn_name))


def _arguments(entry: Any) -> list[Any]:
    """The arguments of one call: a line of JSON each, or the list of them."""
    if isinstance(entry, str):
        return [json.loads(line) for line in entry.split("\n")]
    if not isinstance(entry, list):
        raise ValueError(f"expected a list of arguments, got {entry!r:.80}")
    return entry


def _lines(entry: Any) -> str:
    return "\n".join(map(str, entry)) if isinstance(entry, list) else str(entry)


def program_of(response: str) -> str | None:
    """The program in a response: its last fenced block of Python, else its last fenced block, else all; None if empty.

    Thoughts between <think> and </think> do not count. A block that is not closed goes to the end.
    """
    end = max((found.end() for found in _END_OF_THOUGHTS.finditer(response)), default=0)
    answer = _THOUGHTS.sub("", response[:end]) + response[end:]
    blocks = _FENCE.findall(answer)
    ours = [code for language, code in blocks if language.lower() in ("python", "python3", "py")]
    program = (ours or [code for _, code in blocks] or [answer])[-1]
    return program if program.strip() else None


def is_same_text(output: str, expected: str) -> bool:
    """True if two outputs are equal line by line, but for white space at their ends and the spelling of decimals.

    Where the expected word is a decimal such as 0.50 or 1e-3, another number within 1e-5, relatively, is the same one;
    0.0 is what lies within 1e-8 of it.
    """
    ours, theirs = output.strip(), expected.strip()
    return ours == theirs or all(
        _is_same_word(word, other) for word, other in zip_longest(_tokens(ours), _tokens(theirs), fillvalue="")
    )


def _tokens(text: str) -> Iterator[str]:
    return ("\n" if found[0].isspace() else found[0] for found in _TOKEN.finditer(text))


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
    """True if a call gave what was expected; a list of one entry may stand for the entry, as in APPS."""
    stands_for = expected[0] if isinstance(expected, list) and len(expected) == 1 else expected
    return _is_same_json(value, expected) or _is_same_json(value, stands_for)


def _is_same_json(value: Any, expected: Any) -> bool:
    """True if two values of JSON are equal, where 1 is 1.0 and not true."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_is_same_json, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_is_same_json(value[key], expected[key]) for key in expected)
    return isinstance(value, bool) is isinstance(expected, bool) and bool(value == expected)
