"""Health: every loss is a row with what it was and what it cost; the sums are the counters of the run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from selenium_axe_python import Axe

from tests.integration.viewer.test_functions import CALL
from tests.support.browser import Page, viewer
from tests.support.killed_run import CAUSES, COUNTED, KILLS, make_killed_run
from tests.support.viewed_runs import Shape, add_event, make_run, write_live

pytestmark = pytest.mark.browser

CELLS = "return [...arguments[0].children].map((cell) => cell.textContent)"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_killed_run(tmp_path_factory.mktemp("killed") / "run")


@pytest.fixture(scope="module")
def killed_address(killed: Path) -> Iterator[str]:
    with viewer([killed]) as address:
        yield address


@pytest.fixture
def health(open_page: Callable[[str], Page], killed_address: str) -> Page:
    page = open_page(killed_address)
    page.go("run/0/health")
    page.one("table.losses")
    return page


def rows(page: Page) -> list[list[str]]:
    """The cells of the losses, in their order."""
    return [page.script(CELLS, row) for row in reversed(page.all("tr[data-number]"))]


def test_every_loss_is_a_row_with_role_rank_cause_seconds_and_steps(health: Page) -> None:
    shown = rows(health)
    assert len(shown) == len(KILLS)
    for row, (role, rank, seconds, repeated) in zip(shown, KILLS, strict=True):
        assert row[1:3] == [role, "–" if rank is None else str(rank)]
        assert row[4] == CAUSES.get(role, "its events stop without an `end`")
        assert row[5] == ("with the one before" if seconds is None else f"{seconds:.1f} s")
        assert row[6] == ("–" if repeated is None else str(repeated))
    assert [row[3] for row in shown] == ["Generate", "–", "Update", "–", "–", "–"]
    assert [row[7] for row in shown] == ["4 → 2", "6 → 6", "7 → 4", "7 → –", "6 → 5", "8 → 6"]
    assert shown[2][8] == "critic, actor; rollout"
    assert shown[1][8] == "rollout; –"


def test_the_sums_are_the_counters_of_each_start(health: Page, killed: Path) -> None:
    groups, controller = (health.script(CELLS, row) for row in health.all("tr.sums"))
    assert groups[:3] == ["Restarts of groups: 4", "30.0 s", "4"]
    assert controller[:3] == [
        "Deaths of the controller: 1, and the time until all groups were there again",
        "23.0 s",
        "1",
    ]
    lines = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    counters = [(line["recovery/num_restarts"], line["recovery/num_repeated_steps"]) for line in (lines[4], lines[-1])]
    found = re.findall(r"start \d+: (\d+) and (\d+)", health.one(".counters").text)
    assert [(int(one), int(other)) for one, other in found] == counters == COUNTED


def test_a_row_opens_the_log_up_to_the_loss_and_leads_to_its_step_in_the_timeline(health: Page) -> None:
    [row] = [row for row in health.all("tr[data-number]") if "critic, actor" in row.text]
    row.find_element("css selector", "button").send_keys(Keys.ENTER)
    logs = health.until(lambda: health.all(".logs pre"), "the logs")
    number = int(row.get_attribute("data-number") or "")
    # An event each second from the second 1 on, and a line each second from 0 on.
    assert [log.text.splitlines()[-1].rpartition(": ")[2] for log in logs] == [f"line {number + 1}"] * 2
    assert health.text().count("in local time") == 2
    row.find_element("css selector", "a").click()
    health.until(lambda: health.driver.current_url.endswith("#/run/0/timeline/train/7"), "the timeline")


def test_lifelines_are_led_through_by_keys_and_read_out(health: Page) -> None:
    lines = health.one("svg.lifelines")
    label = lines.get_attribute("aria-label") or ""
    assert "controller: 2 instances, 1 losses; actor: 4 instances, 2 losses; critic: 4 instances, 2 losses" in label
    assert len(health.all("svg .bar")) == 2 + 4 + 4 + 3
    assert [len(health.all(f"svg .{kind}")) for kind in ("group_lost", "recovered", "validation")] == [6, 3, 1]
    said = []
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_UP):
        lines.send_keys(key)
        said.append(health.one(".said").text)
    assert said[0].startswith("controller, start 1, process 101 on here: from 2026-09-21")
    assert said[1].startswith("actor, instance actor179, processes 10 11 on here")
    assert said[1].endswith("; lost")
    assert CAUSES["actor"] in said[2]
    assert said[3] == said[0]
    lines.send_keys(Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ENTER)
    health.until(lambda: health.driver.current_url.endswith("#/run/0/timeline/train/4"), "the timeline")


@pytest.mark.parametrize("theme", [pytest.param("light", marks=pytest.mark.extended), "dark"])
def test_the_page_with_an_open_log_breaks_no_rule_of_axe_and_is_not_too_wide(health: Page, theme: str) -> None:
    health.script("document.documentElement.style.colorScheme = arguments[0]", theme)
    health.one("tr[data-number] button").click()
    health.one(".logs pre")
    axe = Axe(health.driver)
    axe.inject()
    assert [(rule["id"], [node["target"] for node in rule["nodes"]]) for rule in axe.run()["violations"]] == []
    for width in (390, 1280, 1920):
        health.size(width)
        assert health.script("return document.documentElement.scrollWidth") <= width


def event(kind: str, unix_s: object = 1.0, **fields: Any) -> dict[str, Any]:
    return {"number": 0, "kind": kind, "unix_s": unix_s, "epoch": 1, "step": 3, **fields}


def health_of(page: Page, events: list[dict[str, Any]], *more: Any) -> dict[str, Any]:
    [found] = page.driver.execute_async_script(CALL, "health.js", "healthOf", [[events, *more]])
    return dict(found)


def test_a_run_that_ended_and_went_on_later_has_lost_nothing(health: Page) -> None:
    found = health_of(health, [event("start"), event("end"), event("start", 9.0, epoch=2, resumed_at=3)])
    assert found["losses"] == []
    assert [bar["to"] for bar in found["lanes"][0][1]["bars"]] == [1, 9]


def test_a_controller_that_is_gone_is_a_loss_without_an_end(health: Page) -> None:
    [loss] = health_of(health, [event("start"), event("step", 5.0)], 0, "its controller (process 7) is gone")["losses"]
    assert (loss["role"], loss["cause"], loss["seconds"]) == ("controller", "its controller (process 7) is gone", None)


def test_a_group_that_lives_on_without_its_controller_keeps_its_bar(health: Page) -> None:
    up = {"role": "actor", "instance_id": "a", "pids": [1]}
    events = [event("start"), event("group_up", 2.0, **up), event("start", 9.0, epoch=2), event("group_up", 10.0, **up)]
    [_, (role, lane)] = health_of(health, events, 12.0)["lanes"]
    assert role == "actor"
    assert [(bar["from"], bar["to"]) for bar in lane["bars"]] == [(2, 12)]


def test_a_recovery_whose_loss_is_not_among_the_events_counts(health: Page) -> None:
    found = health_of(health, [event("recovered", seconds=2.0, repeated_steps=3, from_step=5, to_step=2)])
    assert found["starts"] == [{"epoch": 1, "restarts": 1, "repeated": 3}]
    assert "not among the events" in found["losses"][0]["cause"]


def test_events_that_no_run_writes_end_no_page(open_page: Callable[[str], Page], tmp_path: Path) -> None:
    names = ("unix_s", "epoch", "step", "role", "rank", "cause", "method", "restarted", "kept", "instance_id", "pids")
    more = ("seconds", "repeated_steps", "from_step", "to_step", "resumed_at", "host", "pid", "reason")
    odds: list[object] = [None, "now", 1e300, -1, {"toString": 0}, [[]]]
    runs = [make_run(tmp_path / str(number), Shape(steps=1)) for number in range(len(odds))]
    for run, odd in zip(runs, odds, strict=True):
        for kind in (
            "start",
            "group_up",
            "group_lost",
            "recovery",
            "recovered",
            "rollout_restart",
            "checkpoint",
            "end",
        ):
            add_event(run, {"kind": kind, **dict.fromkeys((*names, *more), odd)})
        add_event(run, {"kind": odd})
    with viewer(runs) as address:
        page = open_page(address)
        for number in range(len(odds)):
            page.go(f"run/{number}/health")
            page.one("tr[data-number]")
            assert "cannot show" not in page.text()
            page.go("")
            page.one("table.runs")
        page.leave()


def test_a_loss_joins_the_page_once_while_the_run_goes_on(open_page: Callable[[str], Page], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=1), ended=False)
    with viewer([run]) as address:
        page = open_page(address)
        page.go("run/0/health")
        page.until_shown("Nothing was lost.")
        add_event(run, {"kind": "group_lost", "role": "critic", "rank": 0, "cause": "it fell"})
        page.until_shown("it fell")
        add_event(run, {"kind": "recovered", "seconds": 2.5, "repeated_steps": 1, "from_step": 1, "to_step": 0})
        page.until_shown("2.5 s")
        write_live(run, step=1, total=2, phase="training")
        assert len(page.all("tr[data-number]")) == 1
        page.leave()
