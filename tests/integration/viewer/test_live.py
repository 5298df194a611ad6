"""A run that trains while a page shows it: new steps, a recovery, a controller that dies, a server that starts anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.browser import Page, viewer
from tests.support.viewed_runs import Shape, add_event, add_step, go_back, make_run, write_live

pytestmark = pytest.mark.browser

SMALL = Shape(steps=3, prompts=2, samples=2)
STEPS = "return document.querySelector('[data-card=\"critic/score/mean\"] figcaption .dim')?.textContent"

NUM_FACTS = r"return performance.getEntriesByType('resource').filter(({ name }) => /runs\/\d+$/.test(name)).length"
# The answer of facts that is asked for next waits in the browser until it is let go.
HOLD_FACTS = r"""
window.held = [];
const ask = window.fetch;
window.fetch = async (address, ...others) => {
  const answer = await ask(address, ...others);
  if (/runs\/\d+$/.test(address) && !held.length) await new Promise((letGo) => held.push(letGo));
  return answer;
};
"""


@pytest.fixture
def live(tmp_path: Path) -> Path:
    return make_run(tmp_path / "live", SMALL, ended=False)


@pytest.fixture
def page(open_page: Callable[[str], Page], live: Path) -> Iterator[Page]:
    with viewer([live]) as address:
        page = open_page(address)
        page.go("run/0/overview")
        page.until(lambda: page.script(STEPS) == "step 3", "step 3")
        yield page
        page.leave()


def test_a_new_step_a_new_phase_and_a_new_event_come_by_themselves(page: Page, live: Path) -> None:
    add_step(live, 4, SMALL)
    page.until(lambda: page.script(STEPS) == "step 4", "step 4")
    write_live(live, step=4, total=9, phase="training")
    page.until_shown("step 4/9")
    lost = {"kind": "group_lost", "role": "critic", "rank": 1, "method": "Update", "cause": "rank 1 was killed"}
    add_event(live, lost, step=4)
    page.until_shown("critic rank 1 at step 4 in Update: rank 1 was killed")


def test_what_a_page_is_told_while_an_older_answer_is_on_its_way_stays(page: Page, live: Path) -> None:
    page.until(lambda: page.script(NUM_FACTS) == 2, "the facts, and those after the first event")
    page.script(HOLD_FACTS)
    with (live / "metrics.jsonl").open("a") as file:  # of the files of a step this one alone: it makes one event
        file.write('{"step": 4, "critic/score/mean": 0.5}\n')
    page.until(lambda: page.script("return window.held.length"), "an answer that is held back")
    write_live(live, step=3, total=9, phase="ended")
    add_event(live, {"kind": "group_lost", "role": "critic", "rank": 1, "cause": "rank 1 was killed"}, step=4)
    page.until(lambda: page.one("header .state").text == "ended", "the end")
    page.until_shown("critic rank 1 at step 4")
    page.script("window.held.forEach((letGo) => letGo())")
    page.until(lambda: page.script(STEPS) == "step 4", "step 4")
    assert page.one("header .state").text == "ended"
    assert page.text().count("critic rank 1 at step 4") == 1


def test_a_run_that_goes_back_takes_the_page_with_it(page: Page, live: Path) -> None:
    go_back(live, 1)
    page.until_shown("The run went back to step 1.")
    page.until(lambda: page.script(STEPS) == "step 1", "step 1")
    add_step(live, 2, SMALL, seed=5)
    page.until(lambda: page.script(STEPS) == "step 2", "step 2 again")
    page.until(lambda: "The run went back" not in page.text(), "the end of the notice")


def test_recorded_steps_that_go_later_than_their_lines_leave_the_page_too(page: Page, live: Path) -> None:
    caption = STEPS.replace("critic/score/mean", "explained")
    page.until(lambda: page.script(caption) == "step 3", "the interval of step 3")
    files = {step: (live / "rollouts" / "train" / f"{step}.parquet") for step in (2, 3)}
    kept = {step: file.read_bytes() for step, file in files.items()}
    go_back(live, 1)
    for step, file in files.items():
        file.write_bytes(kept[step])
    page.until_shown("The run went back to step 1.")
    for file in files.values():
        file.unlink()
    page.until(lambda: page.script(caption) == "step 1", "the interval of step 1 alone")


def test_a_controller_without_a_heartbeat_is_quiet_and_a_dead_one_is_gone(page: Page, live: Path) -> None:
    write_live(live, step=3, total=9, phase="training", age_s=9_000)
    page.until_shown("quiet for 2.5 h")
    write_live(live, step=3, total=9, phase="training", pid_started=1)
    page.until_shown("is gone")


def test_a_run_that_ends_says_how(page: Page, live: Path) -> None:
    (live / "summary.json").write_text('{"exit_reason": "interrupted"}')
    write_live(live, step=3, total=9, phase="ended")
    page.until(lambda: "interrupted" in page.one("header").text, "the end")


def test_a_run_that_begins_later_joins_the_table_and_keeps_the_addresses_of_the_others(
    open_page: Callable[[str], Page], tmp_path: Path
) -> None:
    make_run(tmp_path / "b", SMALL)
    with viewer([tmp_path]) as address:
        page = open_page(address)
        page.one("table.runs tbody a")
        make_run(tmp_path / "a", SMALL)
        page.until(lambda: len(page.all("table.runs tbody tr")) == 2, "the second run")
        addresses = {link.text: link.get_attribute("href").partition("#")[2] for link in page.all("table.runs a")}
        assert addresses == {"b": "/run/0/overview", "a": "/run/1/overview"}
        page.leave()


def test_a_hidden_tab_rests_and_catches_up(page: Page, live: Path) -> None:
    hide = "Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true});"
    hide += "document.dispatchEvent(new Event('visibilitychange'));"
    page.script(hide, True)
    go_back(live, 1)
    for step in (2, 3, 4, 5):
        add_step(live, step, SMALL, seed=7)
    assert page.script(STEPS) == "step 3"
    page.script(hide, False)
    page.until(lambda: page.script(STEPS) == "step 5", "step 5")


def test_a_server_that_is_gone_is_told(open_page: Callable[[str], Page], live: Path) -> None:
    with viewer([live]) as address:
        page = open_page(address)
        page.go("run/0/overview")
        page.until(lambda: page.script(STEPS) == "step 3", "step 3")
    page.until_shown("The viewer's server does not answer")
    page.until(lambda: page.driver.get_log("browser") is not None, "the log")
    page.driver.get("about:blank")
    page.script("window.watched = []")
    page.forget()
