"""The page Timeline: what it draws, how it moves, and the table of a step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from splitppo.run_folder.step_spans import PHASES, Steps
from splitppo.run_folder.trace import read_trace
from tests.support.browser import Page, viewer
from tests.support.viewed_runs import Shape, add_step, make_run
from tests.support.viewed_traces import spans_of, write_trace

pytestmark = pytest.mark.browser

CANVAS = "canvas.lanes"
# The colours in the actor's lane between the two times of each pair; a canvas is read once.
COLOURS = """
const canvas = document.querySelector("canvas.lanes"), scale = canvas.width / canvas.clientWidth;
const [start, end] = canvas.dataset.view.split(" ").map(Number);
const x = (time) => Math.round((92 + ((time - start) / (end - start)) * (canvas.clientWidth - 92)) * scale);
const { data } = canvas.getContext("2d").getImageData(0, 22 * scale, canvas.width, 12 * scale);
return arguments[0].map(([from, to]) => {
  const found = new Set();
  for (let at = 0; at < data.length / 4; at++) {
    if (at % canvas.width >= x(from) && at % canvas.width < x(to)) found.add(data.slice(4 * at, 4 * at + 3).join());
  }
  return [...found];
});
"""
# Instead of a download, its text.
SAVED = """
const done = arguments[0];
HTMLAnchorElement.prototype.click = function () { fetch; window.savedName = this.download; };
URL.createObjectURL = (blob) => { blob.text().then((text) => done([window.savedName, text])); return "#"; };
[...document.querySelectorAll("button")].find((one) => one.innerText.startsWith("download")).click();
"""


def view(page: Page) -> tuple[float, float]:
    """The first and the last second that are shown."""
    start, end = page.one(CANVAS).get_attribute("data-view").split()
    return float(start), float(end)


def until_moved(page: Page, before: tuple[float, float]) -> tuple[float, float]:
    page.until(lambda: view(page) != before, "another part of the time")
    return view(page)


@pytest.fixture
def lanes(page: Page) -> Page:
    page.go("run/0/timeline")
    page.until(lambda: page.one(CANVAS).get_attribute("data-view"), "the timeline")
    return page


def test_work_has_the_colours_of_the_figures_and_lost_work_is_hatched(lanes: Page) -> None:
    first = 3 - 1.1  # step 1; the first lost span begins at 0
    places = [(first + 0.05, first + 0.35), (first + 0.65, first + 1.0), (0.65, 1.0)]
    generated, updated, lost = lanes.script(COLOURS, places)
    for name, colours in (("gen", generated), ("update_actor", updated)):
        hexes = [int(PHASES[name][1][at : at + 2], 16) for at in (1, 3, 5)]
        assert colours == [",".join(map(str, hexes))]
    assert len(lost) > 2
    assert "hatched: lost work" in lanes.text()


def test_the_mouse_pans_zooms_and_tells_what_is_below_it(lanes: Page) -> None:
    before = view(lanes)
    canvas = lanes.one(CANVAS)
    lanes.script("arguments[0].dispatchEvent(new WheelEvent('wheel', {deltaY: -900, cancelable: true}))", canvas)
    near = until_moved(lanes, before)
    assert near[1] - near[0] < (before[1] - before[0]) / 2
    ActionChains(lanes.driver).move_to_element(canvas).click_and_hold().move_by_offset(-200, 0).release().perform()
    later = until_moved(lanes, near)
    assert later[0] > near[0]
    assert later[1] - later[0] == pytest.approx(near[1] - near[0])
    lanes.go("run/0/timeline/train/3")
    lanes.one("table.critical")
    width = canvas.size["width"]
    beside = int(92 + (width - 92) * 0.2 - width / 2)
    height = canvas.size["height"]
    ActionChains(lanes.driver).move_to_element_with_offset(canvas, beside, int(28 - height / 2)).perform()
    lanes.until(lambda: "generate (gen)" in lanes.one(".details").text, "what is below the mouse")
    assert "step 3" in lanes.one(".details").text
    assert "0.4 s" in lanes.one(".details").text


def test_two_fingers_zoom_and_what_is_below_them_stays_there(lanes: Page) -> None:
    left, top, width = lanes.script(
        "const box = arguments[0].getBoundingClientRect(); return [box.left + 92, box.top, box.width - 92]",
        lanes.one(CANVAS),
    )

    def touch(kind: str, *shares: float) -> None:
        points = [{"x": left + share * width, "y": top + 40, "id": finger} for finger, share in enumerate(shares)]
        lanes.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    def below(share: float) -> float:
        begin, end = view(lanes)
        return begin + share * (end - begin)

    before, times = view(lanes), (below(0.4), below(0.6))
    touch("touchStart", 0.4)
    touch("touchStart", 0.4, 0.6)
    touch("touchMove", 0.2, 0.8)
    until_moved(lanes, before)
    lanes.until(lambda: (below(0.2), below(0.8)) == pytest.approx(times, abs=1e-3), "what was below the fingers")
    touch("touchEnd")
    near = view(lanes)
    touch("touchStart", 0.5)
    touch("touchMove", 0.1)
    panned = until_moved(lanes, near)
    assert panned[1] - panned[0] == pytest.approx(near[1] - near[0])
    touch("touchEnd")


def test_keys_pan_zoom_choose_and_open_a_step(lanes: Page) -> None:
    canvas = lanes.one(CANVAS)
    whole = view(lanes)
    canvas.send_keys("+")
    near = until_moved(lanes, whole)
    canvas.send_keys(Keys.ARROW_RIGHT)
    later = until_moved(lanes, near)
    assert later[0] > near[0]
    canvas.send_keys("-")
    until_moved(lanes, later)
    canvas.send_keys(Keys.HOME)
    lanes.until(lambda: view(lanes) == whole, "all of it")
    canvas.send_keys(Keys.ARROW_DOWN)
    lanes.until(lambda: "lost" in lanes.one(".details").text, "the first span")
    for _ in range(len(spans_of(2))):
        canvas.send_keys(Keys.ARROW_DOWN)
    lanes.until(lambda: "step 1" in lanes.one(".details").text, "the first span that was not lost")
    canvas.send_keys(Keys.ENTER)
    lanes.one("table.critical")
    assert lanes.driver.current_url.endswith("#/run/0/timeline/train/1")


def test_the_table_of_a_step_has_the_numbers_of_the_figures(page: Page, runs: list[Path]) -> None:
    steps = Steps(read_trace(runs[0] / "trace.json"))
    page.go("run/0/timeline/train/4")
    page.one("table.critical")
    start, _, end = steps.times(4)
    shown = {row.text.split()[0]: row.text.split() for row in page.all("table.busy tbody tr")}
    assert {pool: float(row[1]) for pool, row in shown.items()} == pytest.approx(steps.busy(4), abs=1e-3)
    for pool, seconds in steps.busy(4).items():
        assert float(shown[pool][2]) == pytest.approx(100 * seconds / (end - start), abs=0.06)
        assert float(shown[pool][4]) == pytest.approx(100 - 100 * seconds / (end - start), abs=0.06)
    waited: dict[str, float] = {}
    for piece in steps.critical_path(4):
        key = f"{piece.pool or '–'} {PHASES.get(piece.name, (piece.name,))[0]}"
        waited[key] = waited.get(key, 0.0) + piece.duration_s
    cells = [[cell.text for cell in row.find_elements("css selector", "td")] for row in page.all(".critical tbody tr")]
    assert {f"{pool} {phase}": float(seconds) for pool, phase, seconds, _ in cells} == pytest.approx(waited, abs=1e-3)
    assert sum(float(share.split()[0]) for *_, share in cells) == pytest.approx(100, abs=0.5)
    first, last = view(page)
    assert last - first == pytest.approx(1.1 * (end - start), rel=0.01)


def test_the_download_is_a_trace_of_all_that_was_not_lost(lanes: Page, runs: list[Path], tmp_path: Path) -> None:
    name, text = lanes.driver.execute_async_script(SAVED)
    assert name == "trace.json"
    (tmp_path / name).write_text(text)
    wanted = read_trace(runs[0] / "trace.json")
    got = sorted(read_trace(tmp_path / name))
    assert [(one.pool, one.name, one.step) for one in got] == [(one.pool, one.name, one.step) for one in sorted(wanted)]
    assert [one.started_s for one in got] == pytest.approx([one.started_s for one in sorted(wanted)], abs=1e-5)
    assert json.loads(text)[0]["name"] == "process_name"


def test_new_steps_join_and_leave_the_zoom(open_page: Callable[[str], Page], tmp_path: Path) -> None:
    small = Shape(steps=3, prompts=2, samples=2, with_trace=True)
    run = make_run(tmp_path / "live", small, ended=False)
    with viewer([run]) as address:
        page = open_page(address)
        page.go("run/0/timeline/train/2")
        page.one("table.critical")
        before = view(page)
        write_trace(run, [span for step in range(1, 5) for span in spans_of(step)])
        add_step(run, 4, small)
        page.until_shown("of 4 recorded")
        assert view(page) == before
        page.leave()


def test_a_run_without_a_trace_says_so_in_one_sentence(page: Page) -> None:
    page.go("run/4/timeline")
    page.until_shown("This run has no trace.json")
