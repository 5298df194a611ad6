"""Ten processes of one run are killed: its record says which each of them was, why it ended, and what it has cost."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.kill_matrix.harness import matrix_config
from tests.support.browser import CHROMIUM, DRIVER, Page, chromium, viewer
from tests.support.runs import Inputs, RunFolder, started
from tests.support.viewer_client import ask

pytestmark = [pytest.mark.extended, pytest.mark.timeout(1800)]

# Ranks of all roles, and the controller in between and as the last.
VICTIMS = [
    *(("actor", 1), ("critic", 0), ("reward", 0), ("controller", 0), ("actor", 0)),
    *(("reward", 0), ("critic", 0), ("actor", 1), ("critic", 0), ("controller", 0)),
]
STEPS_PER_KILL = 5


def counters(folder: RunFolder) -> tuple[int, int]:
    """How often this start of the controller has restarted groups, and how many steps it has done again."""
    line = folder.metrics[-1]
    return int(line["recovery/num_restarts"]), int(line["recovery/num_repeated_steps"])


def killed_run(config: dict[str, Any], path: Path) -> tuple[RunFolder, list[tuple[int, int]]]:
    """Kills every victim two steps after the one before; returns the folder, and the counters of each start."""
    counted = []
    with ExitStack() as stack:
        controller = stack.enter_context(started(config, path))
        for role, rank in VICTIMS:
            goal = max(controller.folder.steps, default=0) + 2
            controller.wait_until(lambda folder, goal=goal: max(folder.steps, default=0) >= goal, f"step {goal}")
            if role == "controller":
                counted.append(counters(controller.folder))
            os.kill(controller.folder.pids(role)[rank], signal.SIGKILL)
            if role == "controller":
                controller.wait()
                controller = stack.enter_context(started(config, path))
        return controller.complete(), [*counted, counters(controller.folder)]


def test_the_record_of_a_run_with_ten_kills_names_each_and_its_sums_are_the_counters(
    inputs: Inputs, tmp_path: Path
) -> None:
    num_steps = STEPS_PER_KILL * len(VICTIMS)
    config = {
        **matrix_config(inputs, max_restarts=20),
        "run": {"total_steps": num_steps},
        "checkpoint": {"save_freq": 3, "keep": 2},
    }
    config["placement"] = {**config["placement"], "reward_model": "reward"}
    folder, counted = killed_run(config, tmp_path / "run")
    assert folder.steps == list(range(1, num_steps + 1))
    facts = asyncio.run(ask([folder.path], "/api/runs/0")).json
    assert facts["train"] == folder.steps  # also those whose first file was of a step that was done again
    events = folder.events
    sent = [{**event, "spans": len(event["spans"])} if "spans" in event else event for event in events]
    assert facts["events"] == [{**event, "number": number} for number, event in enumerate(sent)]  # spans are counted

    lost = [event for event in events if event["kind"] == "group_lost"]
    killed = [one for one in VICTIMS if one[0] != "controller"]
    assert [(event["role"], event["rank"]) for event in lost] == killed
    assert all(event["cause"] for event in lost)
    starts = [event for event in events if event["kind"] == "start"]
    assert [start["epoch"] for start in starts] == [1, 2, 3]
    assert all(start["resumed_at"] > 0 for start in starts[1:])

    recovered = [event for event in events if event["kind"] == "recovered"]
    assert len(recovered) == len(lost)
    assert all(event["seconds"] > 0 and event["to_step"] <= event["from_step"] for event in recovered)
    sums = []
    for _, of_start in groupby((event for event in events if event["kind"] in ("start", "recovered")), epoch_of):
        repeated = [event["repeated_steps"] for event in of_start if event["kind"] == "recovered"]
        sums.append((len(repeated), sum(repeated)))
    assert sums == counted
    assert sum(repeated for _, repeated in sums) > 0
    cut = {span[2] for event in events if event["kind"] == "cut" for span in event["spans"]}
    assert cut  # the work that was lost
    if CHROMIUM.exists() and DRIVER.exists():
        see_health(folder.path, counted)


def see_health(folder: Path, counted: list[tuple[int, int]]) -> None:
    """Reads the page Health: a row for each kill, the counters of each start, and the logs of each row."""
    with viewer([folder]) as address, chromium() as driver:
        page = Page(driver, address)
        page.go("run/0/health")
        page.one("table.losses")
        rows = [row.text for row in reversed(page.all("tr[data-number] td:nth-child(2)"))]
        assert rows == [role for role, _ in VICTIMS]
        assert all(re.fullmatch(r"\d+\.\d s", cell.text) for cell in page.all("tr[data-number] td:nth-child(6)"))
        shown = re.findall(r"start \d+: (\d+) and (\d+)", page.one(".counters").text)
        assert [(int(restarts), int(repeated)) for restarts, repeated in shown] == counted
        groups = page.one("tr.sums").text.split()
        assert int(groups[groups.index("groups:") + 1]) == sum(restarts for restarts, _ in counted)
        assert int(groups[-1]) == sum(repeated for _, repeated in counted)
        for button in page.all("tr[data-number] button"):
            button.click()
            page.one(".logs pre")
            button.click()
        assert page.faults() == []


def epoch_of(event: dict[str, Any]) -> int:
    """The number of the controller's start."""
    epoch: int = event["epoch"]
    return epoch
