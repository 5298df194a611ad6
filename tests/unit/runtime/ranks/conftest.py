"""Fixtures of the runtime's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.runtime.ranks.service import Service


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)
