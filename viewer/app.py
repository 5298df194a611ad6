"""The addresses of the viewer; an address holds only integers, names that `answers` lists, and digests of images."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from splitppo.run_folder.files import Unreadable
from viewer.answers import ANSWERS, Answer, integer, since
from viewer.guard import Guard
from viewer.live import dump, events
from viewer.run import Run

STATIC = Path(__file__).parent / "static"
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

    def of_run(answer: Answer) -> Handler:
        async def handle(request: Request) -> Response:
            run = run_of(request)
            await anyio.to_thread.run_sync(run.refresh)
            value = await anyio.to_thread.run_sync(answer, run, request.path_params, request.query_params)
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
        generation = integer(request.query_params.get("generation"), -1)
        run = run_of(request)
        num_events = integer(request.query_params.get("events"), 0)
        news = events(run, since(request.query_params), generation, num_events, is_ending)
        return StreamingResponse(news, media_type="text/event-stream")

    async def refuse(_: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 422
        return _json({"error": error.detail if isinstance(error, HTTPException) else str(error)}, status)

    app = Starlette(
        routes=[
            Route("/api/runs", all_runs),
            *(Route("/api/runs/{run:int}" + path, of_run(answer)) for path, answer in ANSWERS.items()),
            Route("/api/runs/{run:int}/live", live),
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/", lambda _: FileResponse(STATIC / "index.html")),
        ],
        middleware=[Middleware(GZipMiddleware, minimum_size=_GZIP_FROM_BYTES, compresslevel=1)],
        exception_handlers={Unreadable: refuse, HTTPException: refuse},
    )
    return Guard(app, token=token, allowed_hosts=allowed_hosts)


def _json(value: Any, status: int = 200) -> Response:
    return Response(dump(value), status, media_type="application/json")
