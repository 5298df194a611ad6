"""python -m benchmarks.viewer: how fast the viewer shows a long run, and what it takes of memory.

A generated run of 2,000 steps and 115 metrics, whose record would be 1 GB if the files of its steps were not one file
with many names. The viewer is cold, the browser is Debian's chromium; seconds end when the page has drawn, as polled
every 0.1 s. Milliseconds are taken in the page, since a driver that asks for 8,000 tokens is handed each of them. A
live line counts from its write into metrics.jsonl to its number in the page. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from selenium.webdriver.common.action_chains import ActionChains

from tests.support.browser import Page, chromium, viewer_process
from tests.support.viewed_runs import Shape, add_step, make_run, write_live
from tests.support.viewed_traces import spans_of, write_trace
from viewer.one_file import export

STEPS = 2000
METRICS = 115
LONG = 8_000
LONGEST = 32_000
SPANS = 16_000
COMPARED = 20
SCORE = '[data-card="critic/score/mean"]'
# Milliseconds from a key to two frames later, when its colours are on the screen.
RECOLOUR = """
const done = arguments[1], start = performance.now();
document.dispatchEvent(new KeyboardEvent("keydown", {key: arguments[0], bubbles: true}));
const colour = () => document.querySelector(".tok").style.backgroundColor, old = colour();
requestAnimationFrame(() => requestAnimationFrame(() => done([performance.now() - start, colour() !== old])));
"""
# Milliseconds from an address to two frames after its tokens are there, when their colours are on the screen.
OPEN = """
const [address, done] = arguments, start = performance.now();
const seen = new MutationObserver(() => {
  const token = document.querySelector(".tok");
  if (!token) return;
  seen.disconnect();
  const told = () => done([performance.now() - start, token.style.backgroundColor !== ""]);
  requestAnimationFrame(() => requestAnimationFrame(told));
});
seen.observe(document.body, {childList: true, subtree: true});
location.hash = "#/" + address;
"""
# The longest of 120 frames, in milliseconds, while the page is scrolled from its top to its end.
SCROLL = """
const [done] = arguments, page = document.scrollingElement, step = (page.scrollHeight - innerHeight) / 120;
let last = performance.now(), longest = 0, frames = 0;
requestAnimationFrame(function frame(now) {
  longest = frames ? Math.max(longest, now - last) : 0;
  last = now;
  page.scrollTop = step * ++frames;
  if (frames <= 120) requestAnimationFrame(frame);
  else done([longest, page.scrollTop > 100 * step]);
});
"""
# Frames per second, and the longest frame in milliseconds, while the mouse pans a timeline for 120 frames.
PAN = """
const [done] = arguments, canvas = document.querySelector("canvas.lanes"), before = canvas.dataset.view;
const send = (node, name, x) => node.dispatchEvent(new PointerEvent(name, {clientX: x, bubbles: true, buttons: 1}));
let first, last, longest = 0, frames = 0;
send(canvas, "pointerdown", 1000);
requestAnimationFrame(function frame(now) {
  if (frames) longest = Math.max(longest, now - last);
  first ??= now;
  last = now;
  send(document.body, "pointermove", 1000 - 5 * ++frames);
  if (frames <= 120) return requestAnimationFrame(frame);
  send(document.body, "pointerup", 0);
  done([120000 / (now - first), longest, canvas.dataset.view !== before]);
});
"""
# Whether every card of a comparison has a number of each run, and is drawn anew by now.
COMPARED_ALL = """
const cards = [...document.querySelectorAll(".card figcaption")];
return cards.length > 5 && cards.every((one) => one.querySelectorAll("b").length === arguments[0]);
"""
CHOOSE_TOKENS = """
const axis = document.querySelector(".bar select");
axis.value = "tokens";
axis.dispatchEvent(new Event("change", {bubbles: true}));
"""
TWO_FRAMES = """
const [done] = arguments;
setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 100);
"""
SHOWN = "return document.querySelector(arguments[0]).innerText.includes(arguments[1])"


def main() -> None:
    """Prints a row per number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="how long the steps are replayed, for the heap")
    parser.add_argument("--lines", type=int, default=40, help="live lines that are timed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory("-viewer") as name:
        folder = make_long_run(Path(name) / "long")
        size = sum(file.stat().st_size for file in (folder / "rollouts" / "train").iterdir())
        tell("apparent size of the rollouts, MB", size / 1e6)
        file = Path(name) / "run.html"
        start = time.monotonic()
        export.main([str(folder), "--out", str(file)])
        tell("export, s", time.monotonic() - start)
        start = time.monotonic()
        with viewer_process([folder]) as (process, address):
            tell("listening, s", time.monotonic() - start)
            with chromium() as driver:
                measure(Page(driver, address), folder, process.pid, options.lines, options.seconds)
        measure_compare(folder, Path(name) / "runs")


def make_long_run(folder: Path) -> Path:
    """Makes the run; its last steps have responses of 32,000 and of 8,000 tokens."""
    make_run(folder, Shape(steps=0), ended=False)
    add_step(folder, 1, Shape(prompts=8, samples=4, mean_tokens=700))
    train = folder / "rollouts" / "train"
    for step in range(2, STEPS - 1):
        os.link(train / "1.parquet", train / f"{step}.parquet")
    for step, tokens in ((STEPS - 1, LONGEST), (STEPS, LONG)):
        add_step(folder, step, Shape(prompts=1, samples=2, mean_tokens=tokens, with_update=True))
    [first, *_] = (folder / "metrics.jsonl").read_text().splitlines()
    known = json.loads(first)
    known |= {f"bench/{number}": 0.5 for number in range(METRICS - len(known) + 1)}
    (folder / "metrics.jsonl").write_text("".join(line(known, step) for step in range(1, STEPS + 1)))
    write_live(folder, step=STEPS, total=2 * STEPS, phase="training")
    write_trace(folder, [span for step in range(1, STEPS + 1) for span in spans_of(step)][:SPANS])
    return folder


def line(known: dict[str, Any], step: int, factor: float = 1.0) -> str:
    """The metrics of a step, of which every number differs from that of the step before."""
    numbers = {name: factor * (step * 1e-4 + at) for at, name in enumerate(known) if name != "step"}
    return json.dumps({"step": step, **numbers}) + "\n"


def measure(page: Page, folder: Path, pid: int, num_lines: int, seconds: float) -> None:
    """Walks down the pages, then appends lines."""
    driver = page.driver
    for kind in ("Network", "HeapProfiler"):
        driver.execute_cdp_cmd(f"{kind}.enable", {})
    page.forget()
    tell("Overview's curves, s", seconds_of(lambda: page.go("run/0/overview"), page, f"{SCORE} figcaption b"))
    index = seconds_of(lambda: None, page, '[data-card="explained"] figcaption b')
    tell("... and then the index of all steps, s", index)
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [one["params"]["encodedDataLength"] for one in events if one["method"] == "Network.loadingFinished"]
    tell("bytes sent for it, kB", sum(sent) / 1e3)
    tell("memory of the viewer, MB", resident_mb(pid))
    curve = page.one(f"{SCORE} .u-over")
    click = ActionChains(driver).move_to_element(curve).click().perform
    tell("a point of a curve to its responses, s", seconds_of(click, page, "table.responses"))
    measure_tokens(page)
    measure_timeline(page)
    page.go("run/0/overview")
    page.one(f"{SCORE} figcaption b")
    known = json.loads((folder / "metrics.jsonl").read_text().partition("\n")[0])
    delays = [live_delay(page, folder, known, STEPS + 1 + at) for at in range(num_lines)]
    tell("a live line to the page, s, p50", float(np.percentile(delays, 50)))
    tell("a live line to the page, s, p95", float(np.percentile(delays, 95)))
    before = heap_mb(page)
    replay(folder, known, STEPS + 1 + num_lines, seconds)
    last = f"step {2 * STEPS + num_lines}"
    page.until(lambda: page.script(SHOWN, f"{SCORE} figcaption", last), last)
    tell(f"growth of the heap over {STEPS:,} further steps, MB", heap_mb(page) - before)


def measure_compare(folder: Path, runs: Path) -> None:
    """Compares as many runs as a page may have, from a table that shows them; no two have a number in common."""
    known = json.loads((folder / "metrics.jsonl").read_text().partition("\n")[0])
    for number in range(COMPARED):
        run = shutil.copytree(folder, runs / f"run {number}", copy_function=os.link)
        (run / "metrics.jsonl").unlink()
        lines = (line(known, step, 1 + number / 100) for step in range(1, STEPS + 1))
        (run / "metrics.jsonl").write_text("".join(lines))
    with viewer_process([runs]) as (_, address), chromium() as driver:
        page = Page(driver, address)
        page.one("table.runs tbody tr")
        numbers = "-".join(map(str, range(COMPARED)))
        for what, act in (("", f"location.hash = '#/compare/{numbers}'"), (", over tokens", CHOOSE_TOKENS)):
            start = time.monotonic()
            page.script(act)
            page.until(lambda: page.script(COMPARED_ALL, COMPARED), "all curves")
            page.driver.execute_async_script(TWO_FRAMES)
            tell(f"{COMPARED} runs compared{what}, s", time.monotonic() - start)


def measure_tokens(page: Page) -> None:
    """Opens a long response for the first time, colours it anew, and scrolls through a longer one."""

    def ms_of(script: str, *arguments: str) -> float:
        ms, is_done = page.driver.execute_async_script(script, *arguments)
        if not is_done:
            raise SystemExit(f"the page did not do it: {script}")
        return float(ms)

    tell(f"a response of {LONG:,} tokens, coloured, ms", ms_of(OPEN, f"run/0/tokens/train/{STEPS}/0"))
    recolours = [ms_of(RECOLOUR, str(1 + at % 2)) for at in range(1, 11)]
    tell("other colours for it, ms (median)", float(np.median(recolours)))
    page.go("run/0/overview")
    page.one(f"{SCORE} figcaption b")
    tell(f"a response of {LONGEST:,} tokens, coloured, ms", ms_of(OPEN, f"run/0/tokens/train/{STEPS - 1}/0"))
    tell("longest frame while it is scrolled, ms", ms_of(SCROLL))


def measure_timeline(page: Page) -> None:
    """Pans the timeline, of which 70 % and then a half is shown."""
    opened = seconds_of(lambda: page.go("run/0/timeline"), page, "canvas.lanes[data-view]")
    tell(f"a timeline of {SPANS:,} spans, s", opened)
    for percent in (70, 49):
        page.one("button[aria-label='zoom in']").click()
        rate, longest, is_moved = page.driver.execute_async_script(PAN)
        if not is_moved:
            raise SystemExit("the timeline did not move")
        tell(f"... panned while {percent} % are shown, frames/s", rate)
        tell("... and its longest frame, ms", longest)


def tell(what: str, number: float) -> None:
    """Prints a row."""
    print(f"{what:48s}{number:10,.2f}", flush=True)


def seconds_of(act: Callable[[], object], page: Page, selector: str) -> float:
    """Seconds from `act` until an element is there."""
    start = time.monotonic()
    act()
    page.one(selector)
    return time.monotonic() - start


def live_delay(page: Page, folder: Path, known: dict[str, Any], step: int) -> float:
    """Seconds from the write of a line until the page names its step."""
    append(folder, known, step)
    start = time.monotonic()
    while not page.script(SHOWN, f"{SCORE} figcaption", f"step {step}"):
        time.sleep(0.01)
        if time.monotonic() - start > 30:
            raise SystemExit(f"step {step} did not come within 30 s")
    return time.monotonic() - start


def append(folder: Path, known: dict[str, Any], step: int) -> None:
    """Writes the line of a step, and that the run is alive."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line(known, step))
    write_live(folder, step=step, total=2 * STEPS, phase="training")


def replay(folder: Path, known: dict[str, Any], first: int, seconds: float) -> None:
    """Appends as many steps as the run had, evenly over the seconds."""
    start = time.monotonic()
    for at in range(STEPS):
        append(folder, known, first + at)
        time.sleep(max(0.0, start + (at + 1) * seconds / STEPS - time.monotonic()))


def heap_mb(page: Page) -> float:
    """What the page's heap holds after a collection of garbage."""
    page.driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
    return float(page.driver.execute_cdp_cmd("Runtime.getHeapUsage", {})["usedSize"]) / 1e6


def resident_mb(pid: int) -> float:
    """What a process holds of memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1e3 if found else 0.0


if __name__ == "__main__":
    main()
