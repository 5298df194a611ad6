"""All pages for people who see little or use no mouse: the rules of axe-core, and contrast in both themes."""

from __future__ import annotations

import pytest
from selenium_axe_python import Axe

from tests.support.browser import Page

pytestmark = pytest.mark.browser

PAGES = {
    "": "table.runs tbody a",
    "run/0/overview": ".chart canvas",
    "run/0/responses/train/2": "table.responses",
    "run/0/tokens/train/2/0": ".tok",
    "run/1/tokens/train/2/0": ".turn",
    "run/0/critic": "canvas.heat",
    "run/4/tokens": ".sentence",
}


@pytest.mark.parametrize("theme", ["light", "dark"])
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
