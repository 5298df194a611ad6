"""Tells a page what is new in a run, as server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from splitppo.run_folder.append_log import json_value
from splitppo.run_folder.files import Unreadable
from viewer.run import Run

POLL_S = 0.5


async def events(
    run: Run, since: int, generation: int, num_events: int, is_ending: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """Yields events until the page or the server ends; `since`, `generation` and `num_events` say what the page has.

    `reset` {"step"}: the file of metrics was replaced, because the run went back to that step; what the page has is
    void. `steps` {"last"}: there are new lines of metrics or new files of responses. `state`: of the run,
    with live.json. `happened`: new lines of events.jsonl.
    """
    last = since
    state_told = ""
    told: list[list[int]] = [[], []]
    while not is_ending():
        await asyncio.to_thread(run.refresh)
        steps = run.metrics.steps
        newest = steps[-1] if steps else -1
        if run.metrics.generation != generation:
            generation = run.metrics.generation
            last = newest
            yield _event("reset", {"step": newest})
        recorded = [(await asyncio.to_thread(run.folder.steps, kind))[-1:] for kind in ("train", "val")]
        if newest > last or recorded != told:
            told = recorded
            last = newest
            yield _event("steps", {"last": newest})
        if len(run.events) != num_events:
            yield _event("happened", {"events": run.told_events(num_events)})
            num_events = len(run.events)
        state = await asyncio.to_thread(run.state)
        shown = json.dumps({**state, "sentence": "", "live": {**(state["live"] or {}), "unix_s": None}})
        if shown != state_told:
            state_told = shown
            yield _event("state", state)
        await asyncio.sleep(POLL_S)


def _event(name: str, value: Any) -> bytes:
    return f"event: {name}\ndata: {dump(value)}\n\n".encode()


def dump(value: Any) -> str:
    """Makes strict JSON of ASCII characters, with null in place of numbers that are not finite.

    Raises:
        Unreadable: a value is of a type that JSON has not.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(json_value(value), allow_nan=False, separators=(",", ":"))
    except TypeError as error:
        raise Unreadable(f"A file of this run holds what no run writes: {error}.") from error
