"""Texts that mean harm, on every page that shows a text."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.support.browser import DEADLINE_S, Page, viewer
from tests.support.hostile_texts import HOSTILE
from tests.support.viewed_runs import Shape, make_run
from viewer.__main__ import listen
from viewer.app import make_app
from viewer.run import Run

pytestmark = pytest.mark.browser

SHOWN = "return [...document.querySelectorAll('.tok')].map((token) => token.textContent).join('')"
HIDDEN = {*"\u202e\u2066\u2069\u200f\u2028\u2029\x00\x07\x1b\u200b\u200d\ufeff"}


def visible(text: str) -> str:
    """The text as the page shows it: signs that hide or turn others by their numbers."""
    return "".join(f"\u27e8{ord(char):04X}\u27e9" if char in HIDDEN else char for char in text)


def look_at_all(page: Page, run: int) -> None:
    assert len(HOSTILE) == 40
    for number, text in enumerate(HOSTILE):
        row = next(row for row in (number, number + len(HOSTILE) + 1) if row % 5 != 4)  # a recorded one
        page.go(f"run/{run}/tokens/train/1/{row + 1}")
        page.until(lambda text=text: str(page.script(SHOWN)).startswith(visible(text)), text)  # type: ignore[misc]
        assert visible(text) in page.one(".facts").get_property("textContent")
    page.go(f"run/{run}/responses/train/1")
    page.one("table.responses")
    content = page.one("table.responses").get_property("textContent")
    assert [text for text in HOSTILE if visible(text) not in content] == []
    page.go("")
    page.until(lambda: "<img src=x onerror=alert(1)>" in page.text(), "the run's name")


def look_at_critic_texts(page: Page, run: int) -> None:
    page.go(f"run/{run}/critic/train/1")
    content = page.one("table.privileged").get_property("textContent")
    assert [text for text in HOSTILE if f"Answer: {visible(text)}" not in content] == []


def test_no_text_runs_loads_or_hides_anything(page: Page) -> None:
    look_at_all(page, 3)
    look_at_critic_texts(page, 3)


@pytest.fixture
def without_policy(runs: list[Path]) -> Iterator[str]:
    """A viewer whose answers carry no Content-Security-Policy."""
    app = make_app([Run(0, runs[3])], token="the-token")

    class Stripped:
        def __init__(self, inner: ASGIApp) -> None:
            self._inner = inner

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            async def without(message: Message) -> None:
                headers = message.get("headers", [])
                if "headers" in message:
                    message["headers"] = [one for one in headers if one[0] != b"content-security-policy"]
                await send(message)

            await self._inner(scope, receive, without)

    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(Stripped(app), log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/#token=the-token"
    server.should_exit = True
    thread.join(DEADLINE_S)


@pytest.mark.extended
def test_the_policy_is_not_what_keeps_them_texts(open_page: Callable[[str], Page], without_policy: str) -> None:
    page = open_page(without_policy)
    assert (
        page.script(
            "const answer = new XMLHttpRequest(); answer.open('GET', '/', false); answer.send();"
            "return answer.getResponseHeader('content-security-policy')"
        )
        is None
    )
    look_at_all(page, 0)
    look_at_critic_texts(page, 0)


def test_contexts_begin_with_a_line_and_show_what_was_said_to_the_model(
    open_page: Callable[[str], Page], tmp_path: Path
) -> None:
    """Of each response the second turn has a context of its own, and the third goes back to the first turn."""
    shape = Shape(steps=1, prompts=5, samples=8, mean_tokens=40, with_contexts=True, with_conversations=True)
    run = make_run(tmp_path / "run", replace(shape, texts=HOSTILE))
    rows = pq.read_table(run / "rollouts/train/1.parquet").to_pylist()
    with viewer([run]) as address:
        page = open_page(address)
        for row in [row for row in rows if row["why"]][::4]:
            page.go(f"run/0/tokens/train/1/{row['row'] + 1}")
            said = visible(HOSTILE[row["row"] % len(HOSTILE)])
            page.until(lambda said=said: said in str(page.script(SHOWN)), said)  # type: ignore[misc]
            start, length, *_ = row["segments"]
            what = f"{length} tokens that the model sees, and nothing before"
            heads = [head.text for head in page.all(".tokens .turn")]
            assert heads[1::2] == [f"context 2 begins anew: {what}", f"context 3 goes on from turn 1: {what}"]
            assert [head.split(" reward")[0] for head in heads[::2]] == ["turn 1", "turn 2", "turn 3"]
            tokens = page.all(".tok")
            sampled = [bool(token.get_attribute("style")) for token in tokens]
            assert sampled == [flag > 0 for flag in row["flags"]]
            page.script("arguments[0].click()", tokens[start])
            page.until(lambda: "said to the model in context 2" in page.one(".details").text, "the token")
            assert page.all(".details b[data-name]") == []
            page.script("arguments[0].click()", tokens[start - 1])
            following = row["value"][start + length]
            page.until(lambda: page.all('.details [data-name="value"]'), "its value")
            shown = page.one('.details [data-name="value"]').text.split(" → ")
            assert [float(one) for one in shown] == pytest.approx([row["value"][start - 1], following], abs=5e-4)
            messages = [one.text for one in page.all(".message, p.context")]
            assert messages[-3] == "context 2"
            assert said in page.all(".message")[-2].get_property("textContent")
        page.leave()


def test_a_page_without_the_token_says_how_to_get_one(open_page: Callable[[str], Page], address: str) -> None:
    page = open_page(address.replace("#token=", "#token=not-"))
    page.until_shown("open the address that the viewer printed")
    # The browser itself logs each 401; nothing else may be there.
    assert [fault for fault in page.faults() if "401" not in fault] == []


def test_events_of_any_kind_are_shown_and_end_no_page(open_page: Callable[[str], Page], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=2))
    events: list[dict[str, object]] = [
        {"kind": "start", "unix_s": 1e300, "changes": {"a": {"toString": 0}}},
        {"kind": "__proto__", "unix_s": "now", "cause": "first"},
        {"kind": "constructor", "cause": {"toString": 0}},
        {"kind": "group_lost", "role": {"toString": 0}},
        {"kind": {"toString": 0}, "unix_s": -1e300, "why": "last"},
    ]
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    with viewer([run]) as address:
        page = open_page(address)
        page.go("run/0/overview")
        page.until_shown("last")
        assert len(page.all(".events li")) >= len(events)
        page.leave()
