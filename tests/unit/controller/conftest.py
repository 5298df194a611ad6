"""Fixtures for tests of the controller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest


@pytest.fixture
async def no_task_is_left() -> AsyncIterator[None]:
    """After the test, nothing that it started still runs."""
    yield
    assert asyncio.all_tasks() == {asyncio.current_task()}
