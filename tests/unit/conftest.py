"""Fixtures for tests of several folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import save_policy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of random weights."""
    return save_policy(tmp_path_factory.mktemp("models") / "policy")
