"""A browser for the tests of the viewer's pages, and runs that they show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from tests.support.browser import CHROMIUM, DRIVER, Page, chromium, viewer
from tests.support.hostile_texts import HOSTILE
from tests.support.viewed_runs import Shape, make_run

UPDATED = Shape(steps=12, with_update=True, with_trace=True, with_privileged=True)
TALKS = Shape(steps=3, with_conversations=True)


@pytest.fixture(scope="session")
def driver() -> Iterator[webdriver.Chrome]:
    if not (CHROMIUM.exists() and DRIVER.exists()):
        pytest.skip("no browser here: apt-get install chromium chromium-driver")
    with chromium() as driver:
        yield driver


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """In this order: finished, of conversations, without a critic, with hostile texts, from before the record."""
    folder = tmp_path_factory.mktemp("runs")
    old = folder / "old"
    old.mkdir()
    (old / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5}\n{"step": 2, "critic/score/mean": 0.6}\n')
    (old / "summary.json").write_text('{"exit_reason": "completed"}')
    hostile = Shape(steps=1, prompts=21, samples=4, texts=(*HOSTILE, "harmless"), with_privileged=True)
    return [
        make_run(folder / "finished", UPDATED),
        make_run(folder / "talks", TALKS),
        make_run(folder / "grpo", Shape(steps=2, with_critic=False)),
        make_run(folder / "<img src=x onerror=alert(1)>", hostile),
        old,
    ]


@pytest.fixture(scope="session")
def address(runs: list[Path]) -> Iterator[str]:
    with viewer(runs) as address:
        yield address


@pytest.fixture
def open_page(driver: webdriver.Chrome) -> Iterator[Callable[[str], Page]]:
    """Opens pages; afterwards fails for errors, violations, and requests to another origin."""
    opened: list[Page] = []

    def open_one(address: str) -> Page:
        opened.append(Page(driver, address))
        return opened[-1]

    yield open_one
    assert [fault for page in opened[-1:] for fault in page.faults()] == []


@pytest.fixture
def page(open_page: Callable[[str], Page], address: str) -> Page:
    return open_page(address)
