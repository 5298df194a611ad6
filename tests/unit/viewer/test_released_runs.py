"""The viewer shows runs of the first release, version 0.1.0, as that release showed them."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from splitppo.run_folder.files import Unreadable
from tests.support.released_runs import RELEASED, released_run
from viewer.answers import ANSWERS
from viewer.live import dump
from viewer.run import Run


def answer_of(run: Run, address: str) -> Any:
    """Answers an address below that of the run, as the server does; bytes as hexadecimal digits."""
    path, _, query = address.partition("?")
    fields = dict(part.split("=") for part in query.split("&") if part)
    if fields.get("metrics") == "all":
        fields["metrics"] = ",".join(map(str, range(len(run.metrics.names))))
    for pattern, answer in ANSWERS.items():
        found = re.fullmatch(re.sub(r"{(\w+):int}", r"(?P<\1>[0-9]+)", pattern), path)
        if found:
            numbers = {name: int(text) for name, text in found.groupdict().items()}
            try:
                value = answer(run, numbers, fields)
            except Unreadable as error:
                return {"unreadable": str(error)}
            return value.hex() if isinstance(value, bytes) else json.loads(dump(value))
    raise ValueError(f"nothing answers {address}")


def facts_of_the_folder(facts: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Takes these facts, without where the folder lies, a random number, and what the product says of metrics."""
    others = ("path", "generation", "figures", "metrics")
    kept = {name: facts[name] for name in names if name not in others}
    return {**kept, "metrics": [name for name, *_ in facts["metrics"]]}


def without_excerpts(answer: Any) -> Any:
    """Leaves out the beginnings of texts, which tables did not have in the first release."""
    if not isinstance(answer, dict) or "columns" not in answer or not isinstance(answer["columns"], dict):
        return answer
    texts = ("prompt", "response")
    return answer | {"columns": {name: one for name, one in answer["columns"].items() if name not in texts}}


def without_later_columns(answer: Any) -> Any:
    """Leaves out what the first release did not record: contexts, which weights sampled a response, and images."""
    if isinstance(answer, dict) and answer.get("images") == []:  # of a prompt
        return {name: one for name, one in answer.items() if name != "images"}
    if not isinstance(answer, dict) or not isinstance(answer.get("row"), dict):
        return answer
    assert answer["row"].pop("images") == []
    later = ("contexts", "segments", "followed_turns", "version")
    assert [answer["row"][name] for name in later] == [None] * len(later)
    return answer | {"row": {name: one for name, one in answer["row"].items() if name not in later}}


def are_alike(now: Any, before: Any) -> bool:
    """Returns True if two answers are equal; floats may differ in the last digits, as exp does from CPU to CPU."""
    if isinstance(now, dict) and isinstance(before, dict):
        return now.keys() == before.keys() and all(are_alike(now[name], before[name]) for name in now)
    if isinstance(now, list) and isinstance(before, list):
        return len(now) == len(before) and all(map(are_alike, now, before))
    if isinstance(now, float) and isinstance(before, float):
        return math.isclose(now, before, rel_tol=1e-14)
    return bool(now == before)


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The time zone in which the logs were written."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("name", RELEASED)
def test_every_answer_about_a_run_of_the_first_release_is_as_it_was(tmp_path: Path, name: str) -> None:
    folder, expected = released_run(name, tmp_path)
    run = Run(0, folder)
    run.refresh()
    for address, before in expected.items():
        now = answer_of(run, address)
        if address == "":
            assert facts_of_the_folder(now, before) == facts_of_the_folder(before, before)
        else:
            assert are_alike(without_later_columns(without_excerpts(now)), before), address
