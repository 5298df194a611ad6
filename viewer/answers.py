"""Answers what a page asks about a run: the server by its addresses, an export in its file."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from splitppo.run_folder.critic_texts import has_critic_texts, read_critic_texts
from splitppo.run_folder.files import Unreadable, finite
from splitppo.run_folder.images import read_image
from splitppo.run_folder.metrics import AXES, COMPARED, FIGURES, Figure, row_of
from splitppo.run_folder.rollouts import read_row, read_rows, read_scalars
from splitppo.run_folder.trace import TRACE_FILE
from viewer.comparison.config import read_config
from viewer.comparison.prompts import answers_to, fixed_prompts
from viewer.distributions import MAX_STEPS as MAX_STRIPS
from viewer.logs import log_at
from viewer.run import Run
from viewer.tokens import derived

MAX_COLUMNS = 200
# Of a run that has just been refreshed, by what the path and the query hold: bytes, or a value for JSON; raises
# Unreadable. A path holds integers, and the name of an image, which `read_image` checks.
Answer = Callable[[Run, Mapping[str, Any], Mapping[str, str]], Any]


def facts(run: Run, *_: Any) -> dict[str, Any]:
    """Returns what a page needs first: the names of the metrics, the recorded steps, events, state."""
    line = run.overview()
    metrics = run.metrics
    return line | {
        "metrics": [[name, *_described(name)] for name in metrics.names],
        "train": run.folder.steps("train"),
        "val": run.folder.steps("val"),
        "has_critic_texts": has_critic_texts(run.folder),
        "has_trace": run.folder.stamp(TRACE_FILE) is not None,
        "events": run.told_events(),
        "has_events": run.folder.stamp("events.jsonl") is not None,
        "figures": [_drawn(figure, metrics.names) for figure in FIGURES],
        "compared": [*COMPARED.items()],
        "axes": [*AXES.items()],
    }


def _described(name: str) -> tuple[str, str, str]:
    """Returns section, unit and meaning of a metric by the table of all metrics; empty texts for others."""
    found = row_of(name)
    if found is None:
        return "", "", ""
    section, row = found
    return section, row.unit, row.meaning


def _drawn(figure: Figure, names: Sequence[str]) -> dict[str, Any]:
    """Returns a figure as pages get it: `metrics` has the label of each curve by its metric."""
    return {
        "title": f"{figure.title}, {figure.unit}" if figure.unit else figure.title,
        "metrics": figure.curves(names),
        "range": (figure.floor, figure.ceiling),
        "pages": sorted(figure.pages),
        "recorded": figure.recorded,
    }


def columns(run: Run, _: Mapping[str, int], query: Mapping[str, str]) -> bytes:
    """Returns int32 number of steps, int32 steps, then float32 values of each asked metric: one block of 4-byte words.

    Raises:
        Unreadable: the query asks for what is no metric.
    """
    numbers = [integer(number, -1) for number in query.get("metrics", "").split(",") if number][:MAX_COLUMNS]
    if any(not 0 <= number < len(run.metrics.names) for number in numbers):
        raise Unreadable("metrics: expected numbers of metrics of this run")
    steps, values = run.columns(numbers, since(query))
    return np.array([len(steps), *steps], "<i4").tobytes() + b"".join(one.tobytes() for one in values)


def responses(run: Run, path: Mapping[str, int], query: Mapping[str, str], *, kind: str) -> Any:
    """Returns the numbers of all responses of a step, and which of them have a text in what is recorded of them."""
    return read_scalars(run.folder, kind, path["step"], query.get("text", ""))


def response(run: Run, path: Mapping[str, int], _: Mapping[str, str], *, kind: str) -> Any:
    """Returns one response, token by token."""
    found = read_row(run.folder, kind, path["step"], path["row"])
    return _by_token(found, _gamma(run, kind, path["step"]))


def responses_by_token(run: Run, kind: str, step: int, rows: Sequence[int]) -> Iterator[Any]:
    """Returns what `response` returns for each of these rows; in place of one that cannot be read, the error.

    Raises:
        Unreadable: the file of the step cannot be read.
    """
    gamma = _gamma(run, kind, step)
    for found in read_rows(run.folder, kind, step, rows):
        yield found if isinstance(found, Unreadable) else _by_token(found, gamma)


def _by_token(row: Mapping[str, Any], gamma: float) -> dict[str, Any]:
    return {"row": row, "derived": derived(row, gamma)}


def _gamma(run: Run, kind: str, step: int) -> float:
    """Returns the discount of a step, 1 where none was recorded."""
    gamma = finite(run.footers.get(step).get("gamma")) if kind == "train" else None
    return 1.0 if gamma is None else gamma


def config(run: Run, *_: Any) -> dict[str, Any]:
    """Returns the keys of config.yaml as {"actor.lr": "1.0e-06", ...}, or None and a sentence as "error"."""
    try:
        return {"keys": read_config(run.folder), "error": None}
    except Unreadable as error:
        return {"keys": None, "error": str(error)}


# By the path below that of the run.
ANSWERS: Mapping[str, Answer] = {
    "": facts,
    "/columns": columns,
    "/recorded": lambda run, _, query: run.footers.curves(since(query)),
    "/scales": lambda run, *_: run.footers.scales(),
    "/timeline": lambda run, *_: run.spans.table(),
    "/timeline/{step:int}": lambda run, path, _: run.spans.step(path["step"]),
    "/policy": lambda run, _, query: run.distributions.since(since(query), integer(query.get("most"), MAX_STRIPS)),
    "/log/{number:int}": lambda run, path, _: log_at(run.folder, run.events, path["number"]),
    "/critic/{step:int}": lambda run, path, _: read_critic_texts(run.folder, path["step"]),
    "/images/{name}": lambda run, path, _: read_image(run.folder, path["name"]),
    "/config": config,
    "/prompts": lambda run, *_: fixed_prompts(run.folder),
    "/prompts/{prompt:int}": lambda run, path, _: answers_to(run.folder, path["prompt"]),
    **{f"/{kind}/{{step:int}}": partial(responses, kind=kind) for kind in ("train", "val")},
    **{f"/{kind}/{{step:int}}/{{row:int}}": partial(response, kind=kind) for kind in ("train", "val")},
}


def since(query: Mapping[str, str]) -> int:
    """Returns the last step that the page has, -1 for none."""
    return integer(query.get("since"), -1)


def integer(text: str | None, default: int) -> int:
    """Returns a whole number that is not negative, and `default` for any other text."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= 10 else default
