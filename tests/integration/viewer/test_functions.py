"""The functions of the pages that only compute, called in the browser that runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from selenium import webdriver

from tests.support.browser import Page

pytestmark = pytest.mark.browser

CALL = """
const [file, name, all, done] = arguments;
const call = (module) => all.map((given) => module[name](...given) ?? null);
import(`/static/${file}`).then(call).then(done, (error) => done(String(error)));
"""
ROWS = {"row": [0, 1, 2], "step": [4, 4, 4], "prompt_index": [7, 7, 8], "text_hash": ["a", "a", "a"], "why": [2, 1, 0]}
AT: dict[str, Any] = {"run": 0, "rest": [], "kind": "train", "step": None, "to": None, "row": None}
SHARED = "same text for 1 other prompt"
# (file, function): [(arguments, result), ...]
CASES: dict[tuple[str, str], list[tuple[list[Any], Any]]] = {
    ("text.js", "visible"): [
        (["a\nb\tc"], "a\nb\tc"),
        (["\u202eabc\u0000"], "⟨202E⟩abc⟨0000⟩"),
        ([None], ""),
        (["é🙂"], "é🙂"),
    ],
    ("text.js", "number"): [
        ([1234567], "1,234,567"),
        ([0.00012], "1.2e-4"),
        ([0.12345], "0.123"),
        ([12.3456], "12.35"),
        ([1e300], "1.0e+300"),
        ([None], "–"),
        (["7"], "–"),
    ],
    ("text.js", "duration"): [
        ([0.28], "0.3 s"),
        ([59.6], "60 s"),
        ([600], "10 min"),
        ([7200], "2.0 h"),
        ([None], "–"),
        ([-1], "–"),
    ],
    ("text.js", "clock"): [([0], "1970-01-01 00:00:00"), ([1e300], "–"), (["now"], "–")],
    ("text.js", "reasons"): [([0], []), ([2 + 1024], ["high score", "scorer failed"])],
    ("chart.js", "drawn"): [
        ([[-4, None, 0.5, 2], [-1, 1]], [-1, None, 0.5, 1]),
        ([[-4, None]], [-4, None]),
        ([[-4, 7], [0, None]], [0, 7]),
    ],
    ("timeline.js", "clamped"): [
        ([10, 20, 100], {"from": 10, "to": 20}),
        ([-50, -40, 100], {"from": -2, "to": 8}),
        ([95, 110, 100], {"from": 87, "to": 102}),
        ([-1000, 1000, 100], {"from": -2, "to": 102}),
    ],
    ("colours.js", "ownLimits"): [
        (["reward", {"row": {"rewards": [1, None, -2]}, "derived": {}}], [-2, 1]),
        (["ratio", {"row": {}, "derived": {"ratio": [0.5, 1.5]}}], [0.5, 2]),
        (["kl", {"row": {}, "derived": {"kl": [1, 1]}}], None),
        (["kl", {"row": {}, "derived": {"kl": None}}], None),
    ],
    ("parts.js", "nearest"): [([[1, 5, 9], 6], 5), ([[1, 5, 9], 100], 9), ([[3], 0], 3), ([[], 4], 4)],
    ("responses.js", "joined"): [
        ([[{"row": [0, 1], "kl": [0.5, 2]}]], {"row": [0, 1], "kl": [0.5, 2]}),
        ([[{"row": [0]}, {"row": [0, 1], "kl": [3, 4]}]], {"row": [0, 0, 1], "kl": [None, 3, 4]}),
    ],
    # The first comes after (1), beside or before (-1) the second; a missing number is last in both directions.
    ("responses.js", "compared"): [
        ([2, 1, 1], 1),
        ([2, 1, -1], -1),
        ([1, 1, 1], 0),
        ([None, -5, 1], 1),
        ([None, -5, -1], 1),
        ([0, None, 1], -1),
        (["a", "b", 1], -1),
        (["a", "b", -1], 1),
    ],
    ("main.js", "parseAddress"): [
        (["#/"], {"page": "runs"}),
        (["#/run/x/tokens"], {"page": "runs"}),
        (["#/compare/0-3-x"], {"page": "compare", "runs": [0, 3]}),
        (["#/run/2"], AT | {"page": "overview", "run": 2}),
        (
            ["#/run/0/responses/val/3-7"],
            AT | {"page": "responses", "rest": ["val", "3-7"], "kind": "val", "step": 3, "to": 7},
        ),
        (["#/run/0/tokens/train/3/1"], AT | {"page": "tokens", "rest": ["train", "3", "1"], "step": 3, "row": 0}),
        (["#/run/0/tokens/train/3/0"], AT | {"page": "tokens", "rest": ["train", "3", "0"], "step": 3}),
        (["#/run/0/tokens/../3/-1"], AT | {"page": "tokens", "rest": ["..", "3", "-1"], "step": 3}),
    ],
    ("api.js", "parseEvent"): [
        (['event: steps\ndata: {"last": 3}'], {"name": "steps", "value": {"last": 3}}),
        (['event: a\ndata: {"text": "b: c"}'], {"name": "a", "value": {"text": "b: c"}}),
        ([": still here"], None),
    ],
    # Counts lie evenly in their bins; those beyond the limits are in the outermost bins.
    ("policy.js", "rebinned"): [
        ([{"edges": [0, 1, 2], "counts": [2, 4]}, [0, 2], 4], [1, 1, 2, 2]),
        ([{"edges": [-10, 0, 1, 90], "counts": [3, 2, 5]}, [0, 1], 2], [4, 6]),
        ([{"edges": [5, 5, 5], "counts": [3, 4]}, [0, 10], 2], [0, 7]),
        ([{"edges": [-3, -2], "counts": [4]}, [0, 1], 3], [4, 0, 0]),
        ([{"edges": [7, 8], "counts": [4]}, [0, 1], 3], [0, 0, 4]),
    ],
    # -1: removed, 0: kept, 1: added; what is kept has the spaces of the second text.
    ("diff.js", "changes"): [
        (["a b  c", "a x c"], [[0, "a"], [-1, " b"], [1, " x"], [0, " c"]]),
        (["1 2 3 4 5", "1 3 4 6 5"], [[0, "1"], [-1, " 2"], [0, " 3 4"], [1, " 6"], [0, " 5"]]),
        (["a  b", "a b\n"], [[0, "a b"], [1, "\n"]]),
        (["", "a"], [[1, "a"]]),
        (["a", ""], [[-1, "a"]]),
        (["", ""], []),
        (["日本語", "日本人"], [[0, "日本"], [-1, "語"], [1, "人"]]),
        (["k" + " x" * 2100, "k" + " x" * 2099 + " y"], [[0, "k" + " x" * 2099], [-1, " x"], [1, " y"]]),
        (["x " * 2100, "y " * 2100], None),
    ],
    ("compare.js", "seedGroups"): [
        ([[{"run.seed": "1", "run.dir": "a", "x": "1"}, None, {"run.seed": "2", "run.dir": "b", "x": "1"}]], [[0, 2]]),
        ([[{"run.seed": "1", "x": "1"}, {"run.seed": "2", "x": "2"}]], []),
        ([[{"run.seed": "1"}, {"run.seed": "1"}]], []),
        ([[{"x": "1"}, {"x": "1"}]], []),
    ],
    ("compare.js", "differences"): [
        (
            [[{"a": "1", "b": "2", "run.name": "x"}, None, {"a": "1", "b": "3", "run.name": "y", "constructor": "4"}]],
            [["b", ["2", None, "3"]], ["constructor", [None, None, "4"]]],
        ),
    ],
    ("compare.js", "union"): [([[[1, 5], [2, 5, 10]]], [1, 2, 5, 10]), ([[]], [])],
    ("compare.js", "aligned"): [
        ([[1, 2, 3, 4], [1, 3], [7, 8]], [7, None, 8, None]),
        ([[1, 2], [1, 1, 2], [7, None, 8]], [7, 8]),
        ([[1], [], []], [None]),
    ],
    ("compare.js", "spread"): [
        ([[[1, 2, None], [3, 7, 5]]], {"mean": [2, 4.5, None], "high": [3, 7, None], "low": [1, 2, None]}),
    ],
    ("prompt.js", "sameOf"): [
        (
            [{"hash": "h", "data_source": "s", "place": "p"}, [{"hash": "h", "data_source": "s", "place": "q"}]],
            {"hash": "h", "data_source": "s", "place": "q"},
        ),
        (
            [{"hash": "h", "data_source": "s", "place": "p"}, [{"hash": "i", "data_source": "s", "place": "p"}]],
            {"hash": "i", "data_source": "s", "place": "p"},
        ),
        ([{"hash": "h", "data_source": "s", "place": "p"}, [{"hash": "h", "data_source": "t", "place": "p"}]], None),
    ],
    ("prompt.js", "meanScores"): [
        ([[{"step": 8, "score": 1}, {"step": 8, "score": 0}, {"step": 4, "score": None}]], [[4, None], [8, 0.5]]),
    ],
    ("parts.js", "runNumbers"): [(["0-3-5"], [0, 3, 5]), (["1-x-1--2"], [1, 2]), ([None], [])],
    # Ends count code points, not UTF-16 units.
    ("tokens.js", "splitTokens"): [
        (["a🙂bc", [1, 2, 4]], ["a", "🙂", "bc"]),
        (["", []], []),
        (["ab", [0, 2]], ["", "ab"]),
    ],
    ("tokens.js", "laterContexts"): [
        ([{"segments": None, "followed_turns": None}], []),
        ([{}], []),  # a run of an earlier release
        (
            [{"segments": [5, 7, 30, 2], "followed_turns": [0, 1]}],
            [{"number": 2, "start": 5, "length": 7, "turn": 0}, {"number": 3, "start": 30, "length": 2, "turn": 1}],
        ),
        ([{"segments": [5]}], [{"number": 2, "start": 5, "length": None, "turn": 0}]),
    ],
}


@pytest.fixture(scope="module")
def page(driver: webdriver.Chrome, address: str) -> Iterator[Page]:
    """One page for all functions, which change nothing."""
    page = Page(driver, address)
    yield page
    assert page.faults() == []


@pytest.mark.parametrize("function", CASES, ids="/".join)
def test_a_function_of_the_pages_gives(page: Page, function: tuple[str, str]) -> None:
    given, wanted = zip(*CASES[function], strict=True)
    assert page.driver.execute_async_script(CALL, *function, given) == list(wanted)


def test_rows_have_reasons_and_name_texts_that_other_prompts_have(page: Page) -> None:
    [rows] = page.driver.execute_async_script(CALL, "responses.js", "rowsOf", [[ROWS]])
    assert [row["key"] for row in rows] == ["4/0", "4/1", "4/2"]
    assert [row["reasons"] for row in rows] == [["high score", SHARED], [SHARED], [SHARED]]
