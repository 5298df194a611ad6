"""The events of a run as the pages get them: each with its number, and each once."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from tests.support.viewed_runs import Shape, add_event, make_run
from tests.support.viewer_client import ask
from viewer.live import events
from viewer.run import MAX_EVENTS, Run


async def test_of_very_many_steps_in_a_row_the_last_is_told_and_numbers_stay(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=1))
    add_event(run, {"kind": "group_lost", "role": "actor"})
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps({"kind": "step", "step": step}) + "\n" for step in range(MAX_EVENTS))
    add_event(run, {"kind": "end", "number": "mine"})
    shown = (await ask([run], "/api/runs/0")).json["events"]
    assert [(event["kind"], event["number"]) for event in shown] == [
        ("start", 0),
        ("group_lost", 1),
        ("step", MAX_EVENTS + 1),
        ("end", MAX_EVENTS + 2),
    ]


async def test_a_page_is_told_the_events_that_it_lacks_also_those_of_before_it_listened(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=1))
    for role in ("actor", "critic"):
        add_event(run, {"kind": "group_lost", "role": role})
    told: list[dict[str, Any]] = []
    is_told = threading.Event()
    async for event in events(Run(0, run), 1, 0, 2, is_told.is_set):
        name, _, data = event.decode().partition("\ndata: ")
        if name == "event: happened":
            told += json.loads(data)["events"]
            is_told.set()
    assert [(event["number"], event["role"]) for event in told] == [(2, "critic")]
