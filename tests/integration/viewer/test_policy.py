"""Policy: the strips draw what the files say of each step, and lead to its responses, by mouse and by keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.integration.viewer.conftest import UPDATED
from tests.integration.viewer.test_pages import IS_DRAWN
from tests.support.browser import Page, viewer
from tests.support.viewed_runs import Shape, add_step, go_back, make_run

pytestmark = pytest.mark.browser

STRIPS = ("kl", "mismatch", "entropy", "ratio", "kl_by_position", "mismatch_by_position")


def caption(page: Page, name: str) -> str:
    return page.one(f'[data-card="{name}"] p').text


def test_each_strip_is_drawn_and_says_the_percentiles_of_its_tokens(page: Page, tmp_path: Path) -> None:
    rows = add_step(tmp_path, 12, UPDATED)
    page.go("run/0/policy")
    for name in STRIPS:
        page.until(lambda name=name: page.script(IS_DRAWN, f'[data-card="{name}"] canvas'), name)  # type: ignore[misc]
    drawn = [row for row in rows if row["why"] & 1]
    lists = {
        "kl": np.concatenate([row["old"] - row["ref"] for row in rows]),
        "mismatch": np.concatenate([row["old"] - row["rollout"] for row in rows]),
        "entropy": np.concatenate([row["entropy_tokens"] for row in drawn]),
        "ratio": np.concatenate([np.exp(row["new"] - row["old"]) for row in drawn]),
    }
    for name, values in lists.items():
        told = caption(page, name)
        assert "Step 12: p10 " in told
        assert f"of {len(values):,} tokens" in told
        found = [float(number) for number in re.findall(r"p[159]0 (-?[\d.]+(?:e-\d+)?)", told)]
        np.testing.assert_allclose(found, np.quantile(values, (0.1, 0.5, 0.9)), rtol=1e-2, atol=1e-6)
        title = page.one(f'[data-card="{name}"] h2').text
        assert title.endswith("of all tokens" if name in ("kl", "mismatch") else "of the tokens drawn at random")


def test_keys_choose_a_column_and_open_the_responses_of_its_step(page: Page) -> None:
    page.go("run/0/policy")
    strip = page.one('[data-card="entropy"] canvas')
    strip.send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    page.until(lambda: caption(page, "entropy").startswith("Step 3:"), "step 3")
    strip.send_keys(Keys.ARROW_LEFT, Keys.ENTER)
    page.one("table.responses")
    assert page.driver.current_url.endswith("/responses/train/2")


@pytest.mark.parametrize(
    ("name", "place"),
    [("policy", '[data-card="kl"] canvas'), pytest.param("critic", "canvas.heat", marks=pytest.mark.extended)],
)
def test_a_click_on_a_column_opens_its_step(page: Page, name: str, place: str) -> None:
    page.go(f"run/0/{name}")
    page.until(lambda: page.script(IS_DRAWN, place), "the strip")
    strip = page.one(place)
    left = -strip.size["width"] // 2
    ActionChains(page.driver).move_to_element_with_offset(strip, left + 5, 0).click().perform()
    page.until(lambda: page.driver.current_url.endswith("/train/1"), "the first step")


def test_the_strip_of_the_critic_is_led_through_by_keys(page: Page) -> None:
    page.go("run/0/critic/train/6")
    strip = page.one("canvas.heat")
    page.until_shown("At step 6: first")
    strip.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    page.until_shown("At step 4: first")
    strip.send_keys(Keys.ENTER)
    page.until(lambda: page.driver.current_url.endswith("/critic/train/4"), "the step")
    page.until_shown("Worst judged responses of step 4")


def test_what_a_run_has_not_recorded_is_one_sentence(page: Page) -> None:
    page.go("run/4/policy")
    page.until_shown("tracking.rollouts.enable turns their record on")
    page.go("run/2/policy")
    page.until_shown("No file has entropy_tokens")
    assert "No file has both old and new" in page.text()


def test_the_strips_follow_a_run_that_goes_on_and_back(open_page: Callable[[str], Page], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=2), ended=False)
    with viewer([run]) as address:
        page = open_page(address)
        page.go("run/0/policy")
        page.until(lambda: caption(page, "kl").startswith("Step 2:"), "step 2")
        before = caption(page, "kl")
        add_step(run, 3)
        page.until(lambda: caption(page, "kl").startswith("Step 3:"), "step 3")
        go_back(run, 1)
        page.until(lambda: caption(page, "kl").startswith("Step 1:"), "step 1")
        add_step(run, 2, seed=2)
        page.until(lambda: caption(page, "kl").startswith("Step 2:"), "step 2 again")
        assert caption(page, "kl") != before
        page.leave()
