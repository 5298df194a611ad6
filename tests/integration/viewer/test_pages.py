"""The pages in a browser: what they draw, and the way from a curve to a token."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.integration.viewer.conftest import TALKS, UPDATED
from tests.integration.viewer.test_hostile import visible
from tests.support.browser import Page
from tests.support.viewed_runs import GAMMA, add_step

pytestmark = pytest.mark.browser

# Whether a canvas has more than one colour.
IS_DRAWN = """
const canvas = document.querySelector(arguments[0]);
if (!canvas || !canvas.width) return false;
const pen = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", {willReadFrequently: true});
pen.drawImage(canvas, 0, 0);
const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
const found = new Set();
for (let i = 0; i < data.length; i += 4) found.add(`${data[i]},${data[i + 1]},${data[i + 2]},${data[i + 3]}`);
return found.size > 2;
"""


def rows_of(tmp_path: Path, step: int, shape: object = UPDATED) -> list[dict[str, object]]:
    """The responses of a step as the generator made them for the runs that are shown."""
    return add_step(tmp_path, step, shape)  # type: ignore[arg-type]


@pytest.mark.promise("the viewer")
def test_the_runs_are_listed_with_their_state(page: Page) -> None:
    page.until_shown("finished")
    rows = [row.text for row in page.all("table.runs tbody tr")]
    assert len(rows) == 5
    assert "completed" in rows[0]
    page.one("table.runs tbody a").click()
    page.until_shown("Explained variance of the critic")


@pytest.mark.promise("the viewer")
def test_from_a_point_of_a_curve_to_a_coloured_token_in_three_clicks(page: Page) -> None:
    page.go("run/0/overview")
    curve = page.one('[data-card="critic/score/mean"] .u-over')
    page.until(lambda: page.script(IS_DRAWN, '[data-card="critic/score/mean"] canvas'), "the curve")
    ActionChains(page.driver).move_to_element(curve).click().perform()
    page.until(lambda: "/responses/train/" in page.driver.current_url, "the step of the point")
    assert 5 <= int(page.driver.current_url.rsplit("/", 1)[1]) <= 8
    page.one("table.responses tbody a").click()
    page.one(".tok").click()
    assert re.match(r"token 1 ", page.one(".details").text)


def test_every_number_of_a_token_is_that_of_the_formulas(page: Page, tmp_path: Path) -> None:
    row = next(row for row in rows_of(tmp_path, 5) if row["why"])
    numbers = {name: np.array(row[name]) for name in ("value", "rewards", "old", "ref", "rollout", "new", "advantage")}
    following = np.append(numbers["value"][1:], 0.0)
    expected = {
        "value": numbers["value"],
        "delta": numbers["rewards"] + GAMMA * following - numbers["value"],
        "advantage": numbers["advantage"],
        "return": np.array(row["ret"]),
        "reward": numbers["rewards"],
        "ratio": np.exp(numbers["new"] - numbers["old"]),
        "kl": numbers["old"] - numbers["ref"],
        "mismatch": np.abs(numbers["old"] - numbers["rollout"]),
        "old": numbers["old"],
        "entropy": np.array(row["entropy_tokens"]),
    }
    page.go(f"run/0/tokens/train/5/{row['row'] + 1}")
    page.one(".tok")
    text = page.one(".tokens")
    texts = page.script("return [...document.querySelectorAll('.tok')].map((token) => token.textContent)")
    ends = np.array(row["ends"])
    assert texts == [str(row["response"])[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    for at in range(len(ends)):
        text.send_keys(Keys.ARROW_RIGHT)
        page.until(lambda at=at: page.one(".details").text.startswith(f"token {at + 1} "), f"token {at + 1}")  # type: ignore[misc]
        shown = page.script(
            "return Object.fromEntries([...document.querySelectorAll('.details b[data-name]')]"
            ".map((one) => [one.dataset.name, Number(one.dataset.value)]))"
        )
        for name, values in expected.items():
            assert shown[name] == pytest.approx(values[at], abs=1e-6), (at, name)


def test_colours_follow_the_sign_and_clipped_tokens_are_underlined(page: Page, tmp_path: Path) -> None:
    row = next(row for row in rows_of(tmp_path, 5) if row["why"])
    page.go(f"run/0/tokens/train/5/{row['row'] + 1}")
    page.one(".tok")
    page.driver.switch_to.active_element.send_keys("2")
    page.until(lambda: page.all('button[aria-pressed="true"]')[0].text == "2 advantage", "the colour")
    colours = page.script("return [...document.querySelectorAll('.tok')].map((token) => token.style.backgroundColor)")
    for colour, advantage in zip(colours, np.array(row["advantage"]), strict=True):
        red, _, blue = map(int, re.findall(r"\d+", colour)[:3])
        assert (blue > red) == (advantage >= 0)
    clipped = page.script("return [...document.querySelectorAll('.tok')].map((one) => one.matches('.clipped'))")
    assert clipped == [bool(clip) for clip in np.array(row["clip"])]
    page.until(lambda: page.script(IS_DRAWN, '[aria-label^="value and advantage"] canvas'), "value and advantage")


@pytest.mark.promise("the viewer")
def test_a_conversation_has_turns_with_rewards_and_an_environment_without_numbers(page: Page, tmp_path: Path) -> None:
    row = next(row for row in rows_of(tmp_path, 2, TALKS) if row["why"])
    page.go(f"run/1/tokens/train/2/{row['row'] + 1}")
    page.one(".tok")
    heads = [head.text for head in page.all(".turn")]
    assert [head.split(":")[0].split(" reward")[0] for head in heads] == ["turn 1", "environment", "turn 2"]
    assert heads[2] == f"turn 2 reward {int(float(str(row['score'])))}"
    theirs = page.all(".tok.environment")
    assert len(theirs) == sum(turn == 0 for turn in np.array(row["turn"]))
    assert {token.get_attribute("style") for token in theirs} == {""}
    theirs[0].click()
    assert "no value, no advantage" in page.one(".details").text
    assert page.all(".details b[data-name]") == []
    messages = [message.text for message in page.all(".message")]
    assert "tool call" in messages[1]
    assert '{"expression": "12 * 4"}' in messages[1]
    assert messages[2].startswith("tool")


@pytest.mark.promise("the viewer")
def test_the_critic_has_an_interval_positions_calibration_and_its_worst_responses(page: Page, tmp_path: Path) -> None:
    page.go("run/0/critic/train/6")
    page.until(lambda: page.script(IS_DRAWN, "canvas.heat"), "positions")
    page.until(lambda: page.script(IS_DRAWN, '[data-card="explained"] canvas'), "explained variance")
    page.until_shown("bin 10 of 10, ")
    rows = rows_of(tmp_path, 6)
    worst = sorted(rows, key=lambda row: -float(str(row["value_error"])))[0]
    assert page.one("table.worst tbody td").text == str(worst["row"] + 1)


def test_the_critics_page_shows_what_it_alone_read(page: Page, tmp_path: Path) -> None:
    page.go("run/0/critic/train/6")
    shown = page.one("table.privileged tbody tr").get_property("textContent")
    assert shown == f"1Answer: {rows_of(tmp_path, 6)[0]['response']}"
    page.go("run/1/critic")
    page.until(lambda: page.all("canvas.heat"), "a run whose critic reads no text of its own")
    assert page.all("table.privileged") == []


def test_the_table_of_responses_sorts_and_lists_reasons(page: Page, tmp_path: Path) -> None:
    page.go("run/0/responses/train/4")
    page.one("table.responses")
    rows = rows_of(tmp_path, 4)
    [head] = [head for head in page.all("th button") if head.text.startswith("KL")]
    head.click()
    page.until(lambda: page.all('th[aria-sort="descending"]'), "the order")
    wanted = [str(row["row"] + 1) for row in sorted(rows, key=lambda row: -float(str(row["kl"])))]
    assert [row.text.split()[0] for row in page.all("table.responses tbody tr")] == wanted
    assert page.script(IS_DRAWN, "canvas.scatter")
    page.one('button[aria-pressed="false"]').click()
    page.until(lambda: "/responses/val/12" in page.driver.current_url, "validation")


def test_the_table_of_responses_shows_the_texts_that_are_recorded(page: Page, tmp_path: Path) -> None:
    rows = [row for row in rows_of(tmp_path, 4) if row["why"]]
    page.go("run/0/responses/train/4")
    page.one("table.responses")
    texts = [one.get_property("textContent") for one in page.all(".excerpt")]
    for name, part in (("response", slice(120)), ("prompt", slice(-120, None))):
        assert [row["row"] for row in rows if visible(str(row[name])[part]) not in texts] == []


def test_rows_and_prompts_are_counted_from_1_as_rows_of_files_are(page: Page, tmp_path: Path) -> None:
    first = min(rows_of(tmp_path, 3), key=lambda row: int(str(row["row"])))
    page.go("run/0/tokens/train/3/1")
    page.one(".tok")
    page.until_shown(f"response {first['sample'] + 1} of prompt {first['prompt_index'] + 1}")  # type: ignore[operator]
    page.go("run/0/responses/train/3")
    page.one("table.responses tbody tr")
    cells = [row.text.split()[:2] for row in page.all("table.responses tbody tr")]
    assert cells[0] == ["1", str(first["prompt_index"] + 1)]  # type: ignore[operator]


def test_the_configuration_is_a_page_that_is_searched(page: Page) -> None:
    page.go("run/0/config")
    page.one("table.config")
    page.one('input[type="search"]').send_keys("run.seed")
    page.until(lambda: len(page.all("table.config tbody tr")) == 1, "the key")
    assert page.one("table.config tbody td").text == "run.seed"


def test_the_advantage_has_an_axis_and_says_on_which_side(page: Page, tmp_path: Path) -> None:
    row = next(row for row in rows_of(tmp_path, 5) if row["why"])
    page.go(f"run/0/tokens/train/5/{row['row'] + 1}")  # type: ignore[operator]
    page.until_shown("|advantage|, axis on the right")
    assert len(page.all(".u-axis")) == 3


def test_several_steps_are_one_table_whose_texts_are_searched(page: Page, tmp_path: Path) -> None:
    rows = {step: rows_of(tmp_path, step) for step in (3, 4)}
    page.go("run/0/responses/train/3")
    page.one("table.responses")
    assert "step" not in page.one("table.responses thead").text.split()
    last = page.all(".chooser input")[1]
    last.send_keys(Keys.CONTROL + "a")
    last.send_keys("4", Keys.ENTER)
    page.until_shown(f"of {len(rows[3]) + len(rows[4])} responses")
    assert page.driver.current_url.endswith("/responses/train/3-4")
    searched = next(row for row in reversed(rows[4]) if row["why"] and "🙂" in str(row["response"]))
    page.type('input[type="search"]', str(searched["response"]))
    page.one('input[type="search"]').send_keys(Keys.ENTER)
    page.until(lambda: len(page.all("table.responses tbody tr")) == 1, "the response that was searched")
    page.one('input[type="search"]').send_keys("?")
    page.until(lambda: not page.all("table.responses tbody tr"), "nothing, for a text that was not searched")
    page.one('input[type="search"]').send_keys(Keys.BACK_SPACE)
    page.one("table.responses tbody a").click()
    page.one(".tok")
    assert page.driver.current_url.endswith(f"/tokens/train/4/{searched['row'] + 1}")


def test_steps_of_which_none_is_recorded_are_one_sentence(page: Page) -> None:
    page.go("run/0/responses/train/50-60")
    page.until_shown("0 recorded steps from 50 to 60: expected 1 to 20.")
    page.go("run/0/responses/train/2-9")
    page.one("table.responses")


def test_what_a_run_does_not_have_is_one_sentence(page: Page) -> None:
    page.go("run/4/overview")
    page.until_shown("This run has no events.jsonl")
    page.until(lambda: page.script(IS_DRAWN, '[data-card="critic/score/mean"] canvas'), "the curve")
    for name in ("responses", "tokens"):
        page.go(f"run/4/{name}")
        page.until_shown("tracking.rollouts.enable turns their record on")
    page.go("run/4/critic")
    page.until_shown("no interval, no calibration")
    page.go("run/2/critic")
    page.until_shown("uses no critic")


def test_back_and_forward_and_an_address_that_is_opened_later_lead_to_the_same_page(page: Page) -> None:
    page.go("run/0/responses/train/3")
    page.one("table.responses")
    page.go("run/0/tokens/train/3/1")
    page.one(".tok")
    page.driver.back()
    page.one("table.responses")
    page.driver.forward()
    page.one(".tok")
    page.driver.refresh()
    page.one(".tok")
    assert page.driver.current_url.endswith("#/run/0/tokens/train/3/1")


def test_from_run_to_run_nothing_of_the_first_is_asked_of_the_second(page: Page) -> None:
    page.go("run/0/critic")
    page.until_shown("Worst judged responses of step 12")
    page.go("run/2/critic")
    page.until_shown("uses no critic")
    asked = page.script("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert [url for url in asked if "/runs/2/train/" in url] == [page.origin + "/api/runs/2/train/2"]


def test_keys_lead_through_responses_steps_and_prompts(page: Page, tmp_path: Path) -> None:
    recorded = [row for row in rows_of(tmp_path, 3) if row["why"]]
    page.go(f"run/0/tokens/train/3/{recorded[0]['row'] + 1}")
    page.one(".tok")
    body = page.driver.switch_to.active_element
    other_prompt = next(row for row in recorded[2:] if row["prompt_index"] != recorded[1]["prompt_index"])
    for key, end in (
        ("j", f"3/{recorded[1]['row'] + 1}"),
        ("g", f"3/{other_prompt['row'] + 1}"),
        ("]", "train/4"),
        ("[", "train/3"),
    ):
        body.send_keys(key)
        page.until(lambda end=end: page.driver.current_url.endswith(end), key)  # type: ignore[misc]
        page.one(".tok")
    body.send_keys("?")
    page.until_shown("next, previous response")


@pytest.mark.parametrize("width", [390, *(pytest.param(wide, marks=pytest.mark.extended) for wide in (1280, 1920))])
def test_no_page_is_wider_than_the_window(page: Page, width: int) -> None:
    page.size(width)
    for name, sign in (
        ("overview", ".chart canvas"),
        ("responses/train/2", "table.responses"),
        ("tokens/train/2/1", ".tok"),
        ("critic", "canvas.heat"),
        ("timeline/train/3", "table.critical"),
        ("policy", "canvas.heat"),
        ("health", "svg.lifelines"),
        ("prompt/1/with/1-2", "table.answers"),
        ("config", "table.config"),
        ("compare", "table.differences"),
    ):
        page.go("compare/0-1-2-3-4" if name == "compare" else f"run/0/{name}")
        page.one(sign)
        assert page.script("return document.documentElement.scrollWidth") <= width, name


def test_the_theme_changes_at_once_and_stays(page: Page) -> None:
    page.go("run/0/overview")
    page.one(".chart canvas")

    def paper() -> str:
        return str(page.script("return getComputedStyle(document.body).backgroundColor"))

    seen = {}
    for name in ("light", "dark"):
        page.one('button[aria-label="theme"]').click()
        page.until_shown(f"theme: {name}")
        seen[name] = paper()
    assert seen["light"] == "rgb(255, 255, 255)"
    assert seen["dark"] != seen["light"]
    page.driver.refresh()
    page.until_shown("theme: dark")
    assert paper() == seen["dark"]
    page.one('button[aria-label="theme"]').click()
    assert json.loads(page.script("return JSON.stringify(localStorage.getItem('splitppo-theme'))")) == "light dark"
