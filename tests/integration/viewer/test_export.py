"""One file of a run, opened without a server: its pages say what those of the server say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from tests.integration.viewer.test_access import PAGES
from tests.integration.viewer.test_hostile import look_at_all
from tests.support.browser import Page
from viewer.__main__ import main

pytestmark = pytest.mark.browser

STILL = 3  # looks, a twentieth of a second apart
READ_ALONE = "What the critic alone read"  # which no file has


@pytest.fixture(scope="module")
def exported(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a file with all runs."""
    file = tmp_path_factory.mktemp("exported") / "run.html"
    assert main(["export", *map(str, runs), "--out", str(file)]) == 0
    return file.as_uri()


def said(page: Page, address: str, sign: str) -> str:
    """The text of a page once it waits for nothing and stays the same, but for what a file says of itself."""
    page.go(address)
    page.one(sign)
    seen = [""]

    def is_still() -> bool:
        seen.append("" if page.script("return pending") else page.text())
        return len(seen) > STILL and seen[-1] != "" and len({*seen[-STILL:]}) == 1

    page.until(is_still, f"an end of changes of {address}")
    return re.sub(r"quiet for .*", "", seen[-1]).replace(" in this file", " recorded").rstrip()


def test_every_page_says_what_the_server_says(open_page: Callable[[str], Page], address: str, exported: str) -> None:
    page = open_page(address)
    page.script("localStorage.removeItem('splitppo-colour')")  # which the file has not, being of another origin
    expected = {one: said(page, one, sign) for one, sign in PAGES.items()}
    assert READ_ALONE in expected["run/0/critic"]
    expected["run/0/critic"] = expected["run/0/critic"].partition(READ_ALONE)[0].rstrip()
    page.leave()
    page = open_page(exported)
    for one, sign in PAGES.items():
        page.until(lambda one=one, sign=sign: said(page, one, sign) == expected[one], f"the text of {one!r}")


def test_a_file_shows_texts_as_texts(open_page: Callable[[str], Page], exported: str) -> None:
    page = open_page(exported)
    assert "script-src 'nonce-" in page.script("return document.querySelector('meta[http-equiv]').content")
    look_at_all(page, 3)


def test_several_steps_of_a_file_are_searched(open_page: Callable[[str], Page], address: str, exported: str) -> None:
    counts = {}
    for opened in (address, exported):
        page = open_page(opened)
        page.go("run/0/responses/train/3-5")
        page.one("table.responses")
        page.one('input[type="search"]').send_keys("question 3", Keys.ENTER)
        counts[opened] = page.until(lambda page=page: page.all("table.responses tbody tr") and _count(page), "rows")
    assert counts[address] == counts[exported] != "0 of 96 responses"


def _count(page: Page) -> str | None:
    found = re.search(r"(\d+) of 96 responses", page.text())
    return found[0] if found and found[1] != "96" else None
