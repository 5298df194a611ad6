"""The doctor on a live run, behind mutual TLS and a token."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from controller.__main__ import main
from tests.support.external import ExternalGroups
from tests.support.meetings import PAUSE_POINT, let_go
from tests.support.runs import Controller, RunFolder

pytestmark = pytest.mark.timeout(600)


def test_a_doctor_finds_a_busy_run_healthy_and_the_run_ends_with_the_weights_of_an_undisturbed_one(
    completed: Callable[[str, int], RunFolder], groups: ExternalGroups, capsys: pytest.CaptureFixture[str]
) -> None:
    def examine(controller: Controller) -> dict[str, Any]:
        code = main(["doctor", "--json", "--config", str(controller.config_file)])
        content: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert (code, content["findings"]) == (0, [])
        return content

    groups.empty(armed=[PAUSE_POINT])
    with groups.started("run.schedule=gather") as controller:
        controller.wait_until(lambda folder: 1 in folder.steps, "the line of step 1")
        wait = controller.wait_until
        wait(lambda _: examine(controller)["groups"]["actor"]["running_method"] == "Update", "the update that is held")
        let_go(groups.folder.path, 2)
        wait(lambda folder: 2 in folder.steps, "the line of step 2")
        content = examine(controller)
        let_go(groups.folder.path, 3)
        folder = controller.complete()
    actor, critic = content["groups"]["actor"], content["groups"]["critic"]
    assert [group["instance_id"] for group in (actor, critic)] == groups.instance_ids
    assert [rank["device"] for rank in (*actor["ranks"], *critic["ranks"])] == ["CPU", "CPU"]
    assert content["run"]["controller_runs"]
    assert actor["certificate_ends_unix_s"] > content["now_unix_s"] + 80 * 86400
    assert folder.summary["weights_sha256"] == completed("gather", 1).summary["weights_sha256"]
    assert not list(folder.path.glob("nonce-*"))
