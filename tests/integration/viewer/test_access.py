"""All pages for people who see little or use no mouse: the rules of axe-core, and contrast in both themes."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.keys import Keys
from selenium_axe_python import Axe

from tests.support.browser import Page

MOST_KEYS = 60
# Whether the focused element is the wanted one, and whether a frame shows where the focus is.
FOCUS = """
const style = getComputedStyle(document.activeElement);
return [document.activeElement.matches(arguments[0]),
        style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0, document.activeElement.outerHTML];
"""
pytestmark = pytest.mark.browser

PAGES = {
    "": "table.runs tbody a",
    "run/0/overview": ".chart canvas",
    "run/0/responses/train/2": "table.responses",
    "run/0/tokens/train/2/1": 'main:has([aria-label="next response"]) .tok',
    "run/1/tokens/train/2/1": 'main:has([aria-label="next response"]) .turn',
    "run/0/critic": "canvas.heat",
    "run/0/timeline": "canvas.lanes",
    "run/0/timeline/train/3": "table.critical",
    "run/4/timeline": ".sentence",
    "run/0/policy": "canvas.heat",
    "run/0/health": "svg.lifelines",
    "run/0/config": "table.config",
    "run/4/tokens": ".sentence",
    "compare/0-2-4": 'main:has(table.differences) [data-card="critic/score/mean"] span:nth-of-type(4) b',
    "run/0/prompt": "table.answers",
    "run/0/prompt/3/with/2-4": "table.answers",
}


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.extended)])
def test_no_page_breaks_a_rule_of_axe(page: Page, theme: str) -> None:
    page.script("document.documentElement.style.colorScheme = arguments[0]", theme)
    axe = Axe(page.driver)
    found = {}
    for address, sign in PAGES.items():
        page.go(address)
        page.one(sign)
        axe.inject()
        result = axe.run()
        assert "color-contrast" in {rule["id"] for rule in result["passes"]}
        nodes = [(rule["id"], node) for rule in result["violations"] for node in rule["nodes"]]
        found |= {f"{address} {node['target']} {rule}": node["failureSummary"] for rule, node in nodes}
    assert found == {}


def press(page: Page, *keys: str) -> None:
    page.driver.switch_to.active_element.send_keys(*keys)


def tab_to(page: Page, selector: str, *tab: str) -> None:
    """Presses Tab until that element has the focus; each one on the way must show that it has it."""
    page.one(selector)
    for _ in range(MOST_KEYS):
        press(page, *(tab or (Keys.TAB,)))
        is_there, is_seen, element = page.script(FOCUS, selector)
        assert is_seen or element.startswith("<body"), element
        if is_there:
            return
    raise AssertionError(f"{selector} is not reached within {MOST_KEYS} keys; the last was {element}")


def test_keys_alone_lead_from_the_runs_to_a_token_and_to_the_critic(page: Page) -> None:
    tab_to(page, "table.runs tbody a")
    press(page, Keys.ENTER)
    tab_to(page, '[data-card="critic/score/mean"] .plot')
    press(page, Keys.ARROW_LEFT)
    press(page, Keys.ENTER)
    page.one("table.responses")
    press(page, "/")
    assert page.script(FOCUS, 'input[type="search"]')[:2] == [True, True]
    tab_to(page, "table.responses tbody a")
    press(page, Keys.ENTER)
    tab_to(page, ".tokens")
    press(page, Keys.ARROW_RIGHT)
    page.until_shown("token 1 «")
    press(page, "4")
    page.until(lambda: page.one('button[aria-pressed="true"]').text == "4 kl", "the colour")
    tab_to(page, 'nav a[href$="critic"]', Keys.SHIFT, Keys.TAB)
    press(page, Keys.ENTER)
    page.one("canvas.heat")
    tab_to(page, "table.worst tbody a")
    press(page, Keys.ENTER)
    page.one(".tok")


def test_keys_alone_tick_two_runs_compare_them_and_lead_to_a_prompt(page: Page) -> None:
    for run in ("finished", "grpo"):
        tab_to(page, f'input[aria-label="compare {run}"]')
        press(page, Keys.SPACE)
    tab_to(page, 'a[href="#/compare/0-2"]', Keys.SHIFT, Keys.TAB)
    press(page, Keys.ENTER)
    tab_to(page, '[data-card="critic/score/mean"] .plot')
    press(page, Keys.ARROW_LEFT)
    tab_to(page, 'a[href="#/run/0/prompt/with/2"]')
    press(page, Keys.ENTER)
    page.one("table.answers")
    press(page, "]")
    page.until(lambda: page.driver.current_url.endswith("#/run/0/prompt/2/with/2"), "the next prompt")
    press(page, "k")
    page.until(lambda: page.driver.current_url.endswith("#/run/0/prompt/1/with/2"), "the previous prompt")
    page.go("")
    tab_to(page, 'input[aria-label="compare grpo"]')
    press(page, Keys.SPACE)
    page.until_shown("tick several to compare them")
