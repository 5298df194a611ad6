"""Which context a request belongs to, by its history alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from environments.chat import ToolCall, Turn
from environments.gateway.chat_completions import read
from environments.gateway.history import History
from environments.gateway.questions import Answered

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
USER = {"role": "user", "content": "2+3?"}
CALL = {"id": "call00100", "type": "function", "function": {"name": "add", "arguments": '{"a": 2,"b": [3, 1]}'}}
RESULT = {"role": "tool", "tool_call_id": "call00100", "content": "5"}


def turn(number: int, text: str = "") -> Turn:
    return Turn(text, (), "stop", number=number)


def history_of(*answered: tuple[list[dict[str, object]], str]) -> History:
    """A history of requests, each with the text that answered it; turns are numbered from 1."""
    history = History()
    for number, (messages, text) in enumerate(answered, start=1):
        history.add(read({"messages": messages}), Answered(turn(number, text), text))
    return history


def said(text: str, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **more}


def test_the_same_history_and_more_follows_the_latest_turn() -> None:
    history = history_of(([USER], "hm"))
    place = history.place(read({"messages": [USER, said("hm"), {"role": "user", "content": "well?"}]}))
    assert place.follows == turn(1, "hm")
    assert place.messages == ({"role": "user", "content": "well?"},)
    assert place.why == ""


def test_an_earlier_history_and_more_follows_the_turn_that_answered_it() -> None:
    more = [USER, said("hm"), {"role": "user", "content": "well?"}]
    history = history_of(([USER], "hm"), (more, "five"))
    place = history.place(read({"messages": [*more[:2], {"role": "user", "content": "now?"}]}))
    assert place.follows == turn(1, "hm")
    assert place.why == "the history is that of turn 1, the latest turn is 2"
    again = history.place(read({"messages": more}))
    assert (again.follows, again.messages) == (turn(1, "hm"), ({"role": "user", "content": "well?"},))


def test_a_call_is_the_same_however_its_json_is_written() -> None:
    history = History()
    asked = read({"messages": [USER], "tools": [TOOL]})
    call = ToolCall("add", {"b": [3, 1], "a": 2}, "call00100")
    history.add(asked, Answered(turn(1), "", (call,)))
    for content in ({"content": None}, {"content": ""}, {}, {"content": []}, {"content": "", "refusal": None}):
        messages = [USER, {"role": "assistant", "tool_calls": [CALL], **content}, RESULT]
        place = history.place(read({"messages": messages, "tools": [TOOL]}))
        assert place.follows == turn(1)
        assert place.messages == ({"role": "tool", "name": "add", "tool_call_id": "call00100", "content": "5"},)


def test_anything_else_begins_anew_and_says_what_is_different() -> None:
    history = history_of(([USER], "hm"), ([USER, said("hm"), USER], "five"))
    other_call = [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT]
    for messages, why in (
        ([USER], "the same history was answered before"),
        ([{"role": "user", "content": "4?"}], "message 1 is user '4?'; before, it was user '2+3?'"),
        ([USER, said("HM"), USER], "message 2 is assistant 'HM'; before, it was assistant 'hm'"),
        ([{"role": "system", "content": ""}, USER], "message 1 is system ''; before, it was user '2+3?'"),
        (other_call, "message 2 is assistant '' with calls of 'add'; before, it was assistant 'hm'"),
        ([USER, said("hm"), said("and")], "message 3 is assistant 'and'; before, it was user '2+3?'"),
        (
            [USER, said("hm"), USER, said("five"), {"role": "system", "content": "x" * 90}, USER],
            f"message 5 is system '{'x' * 60}'...; expected one of the user or of a tool after the policy's answer",
        ),
    ):
        place = history.place(read({"messages": messages}))
        assert (place.follows, place.why) == (None, why)
        assert len(place.messages) == len(messages)


def test_other_tools_are_another_context() -> None:
    history = history_of(([USER], "hm"))
    place = history.place(read({"messages": [USER, said("hm"), USER], "tools": [TOOL]}))
    assert place.follows is None
    assert place.why == "its tools are others than those of the requests before"
    assert History().place(read({"messages": [USER]})).why == "nothing was answered before"


def test_reasoning_does_not_count() -> None:
    history = history_of(([USER], "hm"))
    messages = [USER, said("hm", reasoning_content="I think"), USER]
    assert history.place(read({"messages": messages})).follows == turn(1, "hm")


def test_of_two_turns_with_the_same_history_the_later_one_goes_on() -> None:
    history = history_of(([USER], "hm"), ([USER], "hm"))
    assert history.place(read({"messages": [USER, said("hm"), USER]})).follows == turn(2, "hm")


texts = st.sampled_from(["", "a", "b"])
messages_of = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), texts), min_size=1, max_size=4)


@given(st.lists(st.tuples(messages_of, texts), max_size=5), messages_of)
def test_what_follows_a_turn_has_exactly_its_history(
    answered: list[tuple[list[tuple[str, str]], str]], asked: list[tuple[str, str]]
) -> None:
    """An independent search through all histories, the longest and then the latest first."""

    def written(pairs: list[tuple[str, str]]) -> list[dict[str, object]]:
        return [{"role": role, "content": text} for role, text in pairs]

    histories = [[*pairs, ("assistant", text)] for pairs, text in answered]
    fitting = [
        (len(one), number)
        for number, one in enumerate(histories, start=1)
        if asked[: len(one)] == one and len(asked) > len(one) and {role for role, _ in asked[len(one) :]} == {"user"}
    ]
    place = history_of(*((written(pairs), text) for pairs, text in answered)).place(read({"messages": written(asked)}))
    assert (place.follows and place.follows.number) == (max(fitting)[1] if fitting else None)
