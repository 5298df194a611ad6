"""Reads the calls of a turn, whatever their format: one after the other, without those that are only thought of.

The time is linear in the length of the turn, because a format looks at each part of a text a limited number of times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from environments.chat import ToolCall
from environments.tool_calls.json_calls import bad_call

_THOUGHT = "<think>"
_THOUGHT_END = "</think>"


@dataclass(frozen=True)
class Written:
    """A call and where it is written: `text[start:end]`.

    Attributes:
        is_whole: True if it is known where the call ends, be it right or wrong.
        hides_rest: True if the call is broken in such a way that what follows may be a part of it.
        is_end_of_another: True if the call, and those before it, may be a part of one value.
    """

    call: ToolCall
    start: int
    end: int
    is_whole: bool = True
    hides_rest: bool = False
    is_end_of_another: bool = False


# Finds the first call that begins at or behind a position of a text; None: there is none.
Find = Callable[[str, int], Written | None]


def read_calls(text: str, find: Find) -> tuple[str, Sequence[ToolCall]]:
    """Returns the text before the first call, and the calls.

    The first `</think>` ends the thought, with which the turn begins, or which may have begun in the prompt; then it is
    the first one that is not inside of a call. Of the calls before it those that are broken are kept, as errors: they
    may have a call in them that is none of the thought. A later `</think>` is text; but calls in a second thought, from
    `<think>` to a `</think>`, are calls with an error.
    """
    first_end = text.find(_THOUGHT_END)
    last_end = text.rfind(_THOUGHT_END)
    # Whether what comes next may belong to a thought that began in the prompt: one that begins here is skipped at once.
    may_be_thought = not text.lstrip().startswith(_THOUGHT)
    position = 0 if may_be_thought or first_end < 0 else first_end + len(_THOUGHT_END)
    calls = list[Written]()
    is_second_thought = False
    while (found := find(text, position)) is not None:
        if not may_be_thought:
            thought, end = (text.rfind(mark, position, found.start) for mark in (_THOUGHT, _THOUGHT_END))
            is_second_thought = thought > end or (is_second_thought and end < 0)
        elif text.find(_THOUGHT_END, position, found.start) >= 0:  # the thought has ended before this call
            calls = _broken(calls)
            may_be_thought = False
        thought_end = text.find(_THOUGHT_END, found.start, found.end) if may_be_thought and not found.is_whole else -1
        if thought_end >= 0:  # it ends inside of this call, which is broken
            calls = _broken([*calls, found])
            may_be_thought = False
            position = thought_end + len(_THOUGHT_END)
            continue
        if is_second_thought and found.end <= last_end:
            found = _refused(found, "it stands in a second thought", "calls behind all thoughts")
        if found.is_end_of_another and calls and not calls[-1].hides_rest:
            calls = [_refused(call, "it may be a part of a value that has tags", "the calls again") for call in calls]
        calls.append(_behind(calls, found))
        position = found.end
    if may_be_thought and text.find(_THOUGHT_END, position) >= 0:  # all calls were in the thought
        calls = _broken(calls)
    return text[: calls[0].start] if calls else text, [written.call for written in calls]


def _behind(calls: Sequence[Written], found: Written) -> Written:
    """Returns a call, with an error if it may be a part of the call before it."""
    if not calls or not calls[-1].hides_rest:
        return found
    refused = _refused(found, "it stands behind a call that is broken, and may be a part of it", "the calls again")
    return replace(refused, hides_rest=True)


def _broken(calls: Sequence[Written]) -> list[Written]:
    """Returns the calls of a thought that are broken; they hide nothing behind it."""
    return [replace(call, hides_rest=False) for call in calls if call.hides_rest or not call.is_whole]


def _refused(found: Written, reason: str, expected: str) -> Written:
    return replace(found, call=bad_call(reason, expected))
