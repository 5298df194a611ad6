"""The addresses of the viewer. They hold integers and names of this file alone."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from viewer.files import Unreadable, finite
from viewer.guard import Guard
from viewer.live import dump, events
from viewer.metrics import meaning
from viewer.run import Run
from viewer.step_files import read_row, read_scalars
from viewer.tokens import derived

STATIC = Path(__file__).parent / "static"
MAX_COLUMNS = 200
MAX_EVENTS = 5_000
MAX_STEPS = 20  # of one table of responses
_GZIP_FROM_BYTES = 2_000
Handler = Callable[[Request], Awaitable[Response]]


def make_app(
    runs: Sequence[Run],
    *,
    token: str,
    allowed_hosts: Collection[str] = (),
    find: Callable[[], Sequence[Path]] = tuple,
    is_ending: Callable[[], bool] = lambda: False,
) -> Guard:
    """Makes the application that shows these runs; pages that listen are let go once `is_ending` returns True.

    `find` returns run folders whenever the table of runs is asked for: new ones join it, at its end.
    """
    runs = list(runs)

    def run_of(request: Request) -> Run:
        number: int = request.path_params["run"]
        if number >= len(runs):
            raise HTTPException(404, f"There is no run {number}: the viewer shows {len(runs)}, and counts from 0.")
        return runs[number]

    def of_run(answer: Callable[[Run, Request], Any]) -> Handler:
        """Makes a handler of a function that returns the value to send, or raises Unreadable."""

        async def handle(request: Request) -> Response:
            value = await anyio.to_thread.run_sync(answer, run_of(request), request)
            return Response(value, media_type="application/octet-stream") if isinstance(value, bytes) else _json(value)

        return handle

    async def all_runs(_: Request) -> Response:
        found = await anyio.to_thread.run_sync(find)
        known = {run.folder.path for run in runs}  # not before: another page may have asked meanwhile
        new = [path for path in found if path not in known]
        runs.extend(Run(number, path) for number, path in enumerate(new, len(runs)))
        lines = await anyio.to_thread.run_sync(lambda: [run.overview() for run in runs])
        return _json({"runs": lines})

    async def live(request: Request) -> Response:
        generation = _integer(request.query_params.get("generation"), -1)
        news = events(run_of(request), _since(request), generation, is_ending)
        return StreamingResponse(news, media_type="text/event-stream")

    async def page(_: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def refuse(_: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 422
        return _json({"error": error.detail if isinstance(error, HTTPException) else str(error)}, status)

    app = Starlette(
        routes=[
            Route("/api/runs", all_runs),
            Route("/api/runs/{run:int}", of_run(lambda run, _: _facts(run))),
            Route("/api/runs/{run:int}/columns", of_run(_columns)),
            Route("/api/runs/{run:int}/recorded", of_run(lambda run, request: run.footers.curves(_since(request)))),
            Route("/api/runs/{run:int}/live", live),
            *(
                Route(f"/api/runs/{{run:int}}/{kind}/{{step:int}}{rest}", of_run(_step_handler(kind, has_row)))
                for kind in ("train", "val")
                for rest, has_row in (("", False), ("/{row:int}", True))
            ),
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/", page),
        ],
        middleware=[Middleware(GZipMiddleware, minimum_size=_GZIP_FROM_BYTES, compresslevel=1)],
        exception_handlers={Unreadable: refuse, HTTPException: refuse},
    )
    return Guard(app, token=token, allowed_hosts=allowed_hosts)


def _facts(run: Run) -> dict[str, Any]:
    """Returns what a page needs first: the names of the metrics, the recorded steps, events, state, scales."""
    line = run.overview()
    metrics = run.metrics
    return line | {
        "metrics": [[name, *meaning(name)] for name in metrics.names],
        "generation": metrics.generation,
        "train": run.folder.steps("train"),
        "val": run.folder.steps("val"),
        "events": run.events[-MAX_EVENTS:],
        "has_events": run.folder.stamp("events.jsonl") is not None,
        "scales": run.footers.scales(),
    }


def _columns(run: Run, request: Request) -> bytes:
    """Returns int32 number of steps, int32 steps, then float32 values of each asked metric: one block of 4-byte words.

    Raises:
        Unreadable: the query asks for what is no metric.
    """
    asked = request.query_params.get("metrics", "").split(",")
    numbers = [_integer(number, -1) for number in asked if number][:MAX_COLUMNS]
    run.refresh()
    if any(not 0 <= number < len(run.metrics.names) for number in numbers):
        raise Unreadable("metrics: expected numbers of metrics of this run")
    steps, columns = run.columns(numbers, _since(request))
    return np.array([len(steps), *steps], "<i4").tobytes() + b"".join(columns)


def _step_handler(kind: str, has_row: bool) -> Callable[[Run, Request], Any]:
    def scalars(run: Run, request: Request) -> Any:
        first, query = request.path_params["step"], request.query_params
        last = _integer(query.get("to"), first)
        steps = [step for step in run.folder.steps(kind) if first <= step <= last] if last > first else [first]
        if not 1 <= len(steps) <= MAX_STEPS:
            raise Unreadable(f"{len(steps)} recorded steps from {first} to {last}: expected 1 to {MAX_STEPS}.")
        return read_scalars(run.folder, kind, steps, query.get("text", ""))

    def row(run: Run, request: Request) -> Any:
        step = request.path_params["step"]
        found = read_row(run.folder, kind, step, request.path_params["row"])
        footer = run.footers.get(step) if kind == "train" else {}
        gamma = finite(footer.get("gamma"))
        return {"row": found, "derived": derived(found, 1.0 if gamma is None else gamma)}

    return row if has_row else scalars


def _json(value: Any, status: int = 200) -> Response:
    return Response(dump(value), status, media_type="application/json")


def _since(request: Request) -> int:
    return _integer(request.query_params.get("since"), -1)


def _integer(text: str | None, default: int) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= 10 else default
