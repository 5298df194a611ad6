"""Parses the test cases of a data set row, finds the program in a response, and compares outputs.

A program stands in a fenced block of code, as in CommonMark 0.31, section 4.5, but less strict.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal

# stdin: the program reads its input and prints. call: a function or a method of `Solution` is called. asserts:
# statements run after the program.
Kind = Literal["stdin", "call", "asserts"]

# Possessive quantifiers, and thoughts only up to the last </think>: so the time is linear in the length of a response.
_THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL | re.IGNORECASE)
_END_OF_THOUGHTS = re.compile(r"</think>", re.IGNORECASE)

_FENCE = r"(?P<fence>(?<![`~])(?:`{3,}+|~{3,}+))"
_OPENING = re.compile(rf"{_FENCE}[ \t]*+(?P<language>\w*+)[^\n`~]*+\n")
_INDENTATION = re.compile(r"[ \t]*+(?:(?:[-*+]|\d{1,9}[.)])[ \t]++)?")  # white space, or the marker of a list
_IS_OPENING = re.compile(r"\w[^\n`~]*\n")
# In comments and strings of Python a fence is text. A string that is never closed reaches to the end of the response.
_SHORT = (
    rf"{_FENCE}|\\."
    r"|#[^\n]*+"
    r'|"(?!"")(?:[^"\\\n]|\\.)*+"'
    r"|'(?!'')(?:[^'\\\n]|\\.)*+'"
)
_LONG = (
    r'"""(?:[^"\\]|\\.|"(?!""))*+(?:"""|(?P<unclosed>\\?\Z))'
    r"|'''(?:[^'\\]|\\.|'(?!''))*+(?:'''|(?P<unclosed_too>\\?\Z))"
)
_ALL_STRINGS = re.compile(f"{_LONG}|{_SHORT}", re.DOTALL)
_SHORT_STRINGS = re.compile(_SHORT, re.DOTALL)
_PYTHON = ("python", "python3", "py", "py3", "pypy", "pypy3")

# Words, and the line breaks of str.splitlines.
_WORD_OR_BREAK = re.compile(r"\S+|\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
# A right output may be larger than the expected one: it may have more decimals and more white space.
_TEXT_FACTOR = 8
_JSON_FACTOR = 2
_SLACK_BYTES = 1 << 16
# An output word or a returned number is equal to the expected one within this, as in numpy.allclose and verl.
_RELATIVE = Decimal("1e-5")
_ABSOLUTE = Decimal("1e-8")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
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
            return is_same_value(_parse(text), self.expected[index])
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
            tests = _parse(tests)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{_EXPECTED}, got {ground_truth!r:.80}") from error
    if isinstance(tests, Mapping):
        tests = {name: value for name, value in tests.items() if value is not None}  # parquet fills other forms' keys
        if "inputs" in tests:
            return _pairs(tests)
    if isinstance(tests, Mapping) and (code := tests.get("functional") or tests.get("assert_case")):
        tests = [code] if isinstance(code, str) else code
    if not isinstance(tests, list) or not tests or not all(isinstance(statements, str) for statements in tests):
        raise ValueError(f"{_EXPECTED}, got {ground_truth!r:.80}")
    return Cases("asserts", tuple(tests))


def _pairs(tests: Mapping[str, Any]) -> Cases:
    """Parses test cases given as lists `inputs` and `outputs`; ValueError if the lists do not fit together."""
    inputs = tests["inputs"]
    outputs = tests.get("outputs")
    fn_name = tests.get("fn_name") or ""
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"{_EXPECTED} with as many outputs as inputs and at least one, got {tests!r:.80}")
    if not fn_name:
        if any(_has_null(entry) for entry in [*inputs, *outputs]):
            raise ValueError(f"{_EXPECTED} with a text for each input and output, got a null in {tests!r:.80}")
        return Cases("stdin", tuple(map(_lines, inputs)), tuple(map(_lines, outputs)))
    try:
        arguments = tuple(map(_arguments, inputs))
        expected = tuple(_parse(output) if isinstance(output, str) else output for output in outputs)
    except ValueError as error:
        raise ValueError(f"expected JSON in the inputs and outputs of fn_name {fn_name!r}: {error}") from error
    return Cases("call", arguments, expected, str(fn_name))


def _arguments(entry: Any) -> list[Any]:
    """Parses the arguments of one function call, given as lines of JSON or as a list."""
    if isinstance(entry, str):
        return [_parse(line) for line in entry.split("\n")]
    if not isinstance(entry, list):
        raise ValueError(f"expected a list of arguments, got {entry!r:.80}")
    return entry


def _has_null(entry: Any) -> bool:
    return entry is None or (isinstance(entry, list) and None in entry)


def _lines(entry: Any) -> str:
    return "\n".join(map(str, entry)) if isinstance(entry, list) else str(entry)


@dataclass(frozen=True)
class _Block:
    """A fenced block: the first word behind its opening fence, its text, and the characters before the fence."""

    language: str
    code: str
    indentation: int = 0

    def program(self) -> str:
        """Returns the text without the indentation of its fence, as far as its first line has this indentation."""
        code = self.code.rstrip(" \t")  # of the closing fence's line
        first_line = code.lstrip("\n").partition("\n")[0]
        width = min(self.indentation, len(first_line) - len(first_line.lstrip(" \t")))
        return re.sub(rf"^[ \t]{{1,{width}}}", "", code, flags=re.MULTILINE) if width else code


def program_of(response: str) -> str | None:
    """Finds the program in a response: the last fenced block of Python, else the last fenced block, else all text.

    Text between <think> and </think> is left out. A block that is not closed goes to the end of the response. Returns
    None if the program is empty.
    """
    end = max((match.end() for match in _END_OF_THOUGHTS.finditer(response)), default=0)
    answer = _THOUGHTS.sub("", response[:end]) + response[end:]
    blocks = _blocks(answer)
    ours = [block for block in blocks if block.language.lower() in _PYTHON]
    program = (ours or blocks or [_Block("", answer)])[-1].program()
    return program if program.strip() else None


def _blocks(text: str) -> list[_Block]:
    """Returns the fenced blocks of a text.

    A fence is closed by the next one of the same mark that is at least as long and stands outside of Python's comments
    and strings. Strings in three quotes are not looked for any more after one of them is not closed.
    """
    blocks: list[_Block] = []
    strings = _ALL_STRINGS
    start = 0
    while (opening := _OPENING.search(text, start)) is not None:
        end, start = _closing(text, opening, strings)
        if end < 0:
            strings = _SHORT_STRINGS
            end, start = _closing(text, opening, strings)
        before = text[text.rfind("\n", 0, opening.start()) + 1 : opening.start()]
        indentation = len(before) if _INDENTATION.fullmatch(before) else 0
        blocks.append(_Block(opening["language"], text[opening.end() : end], indentation))
    return blocks


def _closing(text: str, opening: re.Match[str], strings: re.Pattern[str]) -> tuple[int, int]:
    """Returns where a block ends, and where the search for the next one begins; (-1, -1): a string is not closed."""
    for match in strings.finditer(text, opening.end()):
        if (match.lastgroup or "").startswith("unclosed"):
            return -1, -1
        fence = match["fence"]
        if fence and fence.startswith(opening["fence"]):
            # "```python" at the start of a line: the block was not closed, and the next one begins.
            is_next = text[match.start() - 1] == "\n" and _IS_OPENING.match(text, match.end())
            return match.start(), match.start() if is_next else match.end()
    return len(text), len(text)


def is_same_text(output: str, expected: str) -> bool:
    """Compares an output with the expected output word by word, a line break being a word of its own.

    Other white space does not count, nor does any at the beginning or the end. Numbers may be near (`_is_near`).
    """
    ours = output.strip()
    theirs = expected.strip()
    return ours == theirs or all(
        word == other or _is_near(word, other)
        for word, other in zip_longest(_words_and_breaks(ours), _words_and_breaks(theirs), fillvalue="")
    )


def _words_and_breaks(text: str) -> Iterator[str]:
    """Yields the words of a text, and a newline for each line break of any kind."""
    return ("\n" if match[0].isspace() else match[0] for match in _WORD_OR_BREAK.finditer(text))


def _is_near(number: str, expected: str) -> bool:
    """Returns True if two texts are numbers, not both integers, that differ by at most 1e-8 + 1e-5 * |expected|.

    From an expected integer a number may differ by no more than 1e-5: 3.0 is 3, but 1000001.0 is not 1000000.
    """
    if not (_NUMBER.fullmatch(number) and _NUMBER.fullmatch(expected)):
        return False
    is_integer = _INTEGER.fullmatch(expected) is not None
    if is_integer and _INTEGER.fullmatch(number):
        return False
    try:
        right = Decimal(expected)
        tolerance = _ABSOLUTE + _RELATIVE * abs(right)
        return abs(Decimal(number) - right) <= (min(tolerance, _RELATIVE) if is_integer else tolerance)
    except ArithmeticError:  # an exponent that Decimal cannot compute with
        return False


def is_same_value(value: Any, expected: Any) -> bool:
    """Returns True if a call's return value equals the expected JSON value, or the only entry of an expected list.

    Data sets in the form of APPS put the expected value into a list of one entry.
    """
    stands_for = expected[0] if isinstance(expected, list) and len(expected) == 1 else expected
    return _is_same_json(value, expected) or _is_same_json(value, stands_for)


def _is_same_json(value: Any, expected: Any) -> bool:
    """Returns True if two JSON values are equal, numbers as in outputs; 1 equals 1.0, but 1 does not equal true."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_is_same_json, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_is_same_json(value[key], expected[key]) for key in expected)
    if isinstance(value, bool) is not isinstance(expected, bool):
        return False
    if isinstance(value, int | float) and isinstance(expected, int | float) and value != expected:
        return _is_near(_digits(value), _digits(expected))
    return bool(value == expected)


def _digits(number: float) -> str:
    return repr(number) if isinstance(number, float) else str(Decimal(number))


def _parse(text: str | bytes) -> Any:
    """Parses JSON, with integers of any number of digits; Python's own limit is 4,300."""
    return json.loads(text, parse_int=lambda digits: int(Decimal(digits)))
