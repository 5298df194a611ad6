"""Fixtures for tests of the controller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from splitppo.config import Config
from tests.support.fake_services import make_config
from tests.support.model_folders import write_model, write_rows


@pytest.fixture
async def no_task_is_left() -> AsyncIterator[None]:
    """After the test, nothing that it started still runs."""
    yield
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """A config whose files are all there; changes replace them."""
    actor = write_model(tmp_path / "actor")
    train = write_rows(tmp_path / "train.jsonl", *["sort_letters"] * 4)

    def config(**changes: Any) -> Config:
        return make_config(tmp_path / "run", **{"actor__model": actor, "data__train_files": train} | changes)

    return config
