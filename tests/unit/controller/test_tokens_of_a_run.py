"""The controller's use of the tokens that it is given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from controller.workers.clients import Caller
from controller.workers.worker_groups import WorkerGroups
from splitppo.config import ConfigError
from splitppo.rpc.bearer_tokens import RUN_TOKEN_VARIABLE
from tests.support.fake_services import make_config

TOKEN = "one-that-comes-by-environment"


def groups(run_dir: Path, **services: Any) -> WorkerGroups:
    one_thread = {role: {"threads": 1} for role in ("actor", "critic")}  # a run's folder resolves "auto"
    config = make_config(run_dir, services={**one_thread, **services})
    return WorkerGroups(config, run_dir / "config.yaml", Caller("run", 1), lambda *_: None)


@pytest.mark.parametrize("launch", ["local", "external"])
def test_scoring_processes_inherit_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: str) -> None:
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    monkeypatch.setenv(RUN_TOKEN_VARIABLE, TOKEN)
    groups(tmp_path, launch=launch, security={"token_env": "MY_TOKEN"})
    assert TOKEN not in os.environ.values()


def test_a_token_that_is_missing_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="environment variable MY_TOKEN is not set"):
        groups(tmp_path, security={"token_env": "MY_TOKEN"})
