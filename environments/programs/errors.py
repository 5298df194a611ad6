"""Finds, in what a program wrote to its error output before it failed, the few lines that say why."""

import re
from collections.abc import Sequence

_MAX_CHARACTERS = 600
_MAX_LINES = 4
_MAX_LINE_CHARACTERS = 1_000
_TRACEBACK = "Traceback (most recent call last):"
_PYTHON_FRAME = re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+)')
_NODE_FRAME = re.compile(r"\s+at (?:.*\()?(?:file://)?(?P<file>[^()\s]+?):(?P<line>\d+):\d+\)?$")
_NOT_THE_USERS = re.compile(r"site-packages|dist-packages|node_modules|/lib/python\d|^node:|^<")


def reason_in(lines: Sequence[str]) -> str:
    """Returns why a program failed, as one line of text; `lines` are the last that it printed, none of them empty.

    Of a traceback of Python or a stack of Node it is the error, whole, and the last line of the user's own that led
    there. Else it is the last four lines, without those that have no room.
    """
    return _error_of_python(lines) or _error_of_node(lines) or _last_of(lines)


def _error_of_python(lines: Sequence[str]) -> str:
    """Returns the error behind the last traceback of Python, and its place; empty if there is none."""
    if _TRACEBACK not in lines:
        return ""
    begin = len(lines) - 1 - list(reversed(lines)).index(_TRACEBACK)
    last_frame = max((place for place, line in enumerate(lines) if _PYTHON_FRAME.match(line)), default=begin)
    errors = [line for line in lines[max(begin, last_frame) + 1 :] if not line[0].isspace()]
    return _shortened(" ".join(errors)) + _place_in(lines, _PYTHON_FRAME) if errors else ""


def _error_of_node(lines: Sequence[str]) -> str:
    """Returns the error before the first stack of Node, and its place; empty if there is none."""
    first_frame = next((place for place, line in enumerate(lines) if _NODE_FRAME.match(line)), 0)
    if not first_frame:
        return ""
    return _shortened(lines[first_frame - 1].strip()) + _place_in(list(reversed(lines)), _NODE_FRAME)


def _place_in(lines: Sequence[str], frame: re.Pattern[str]) -> str:
    """Returns " (in FILE, line N)": the last frame in a file of the user's; empty if there is none."""
    found = [match for match in map(frame.match, lines) if match and not _NOT_THE_USERS.search(match["file"])]
    return f" (in {found[-1]['file']}, line {found[-1]['line']})" if found else ""


def _last_of(lines: Sequence[str]) -> str:
    """Returns the last lines that have room, each of them whole; of a last line that has none, the beginning."""
    kept = [_shortened(lines[-1].strip())]
    for line in reversed(lines[-_MAX_LINES:-1]):
        longer = [line.strip(), *kept]
        if len(" / ".join(longer)) > _MAX_CHARACTERS:
            break
        kept = longer
    return " / ".join(kept)


def _shortened(line: str) -> str:
    return line if len(line) <= _MAX_LINE_CHARACTERS else f"{line[:_MAX_LINE_CHARACTERS]}..."
