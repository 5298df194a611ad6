"""Reads the calls of a turn, whatever their format: one after the other, without those that are only thought of.

The time is linear in the length of the turn, because a format looks at each part of a text a limited number of times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    """

    call: ToolCall
    start: int
    end: int
    is_whole: bool = True
    hides_rest: bool = False


# Finds the first call that begins at or behind a position of a text; None: there is none.
Find = Callable[[str, int], Written | None]


def read_calls(text: str, find: Find) -> tuple[str, Sequence[ToolCall]]:
    """Returns the text before the first call, and the calls.

    A thought ends at the first `</think>` if the turn begins with `<think>`. Otherwise it may have begun in the prompt,
    and ends at the last `</think>` that is not inside of a call. A broken call with `</think>` in it belongs to the
    thought if another call follows, and otherwise is a call with an error.
    """
    has_thought = text.lstrip().startswith(_THOUGHT) and _THOUGHT_END in text
    position = text.find(_THOUGHT_END) + len(_THOUGHT_END) if has_thought else 0
    calls, cut = list[Written](), list[Written]()
    while (found := find(text, position)) is not None:
        if text.rfind(_THOUGHT_END, position, found.start) >= 0:
            calls, cut = [], []
        thought_end = text.rfind(_THOUGHT_END, found.start, found.end) if not found.is_whole else -1
        if thought_end >= 0:
            calls, cut = [], [found]
            position = thought_end + len(_THOUGHT_END)
        else:
            calls.append(_behind(calls, found))
            position = found.end
    if text.find(_THOUGHT_END, position) >= 0:
        calls, cut = [], []
    calls = calls or cut
    return text[: calls[0].start] if calls else text, [written.call for written in calls]


def _behind(calls: Sequence[Written], found: Written) -> Written:
    """Returns a call, with an error if it may be a part of the call before it."""
    if not calls or not calls[-1].hides_rest:
        return found
    error = bad_call("it stands behind a call that is broken, and may be a part of it", "the calls again")
    return Written(error, found.start, found.end, found.is_whole, hides_rest=True)
