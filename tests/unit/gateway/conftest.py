"""An endpoint in the event loop of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from environments.gateway.session import Gateway


@pytest_asyncio.fixture
async def gateway() -> AsyncIterator[Gateway]:
    opened = await Gateway.open("127.0.0.1", 0)
    yield opened
    await opened.close()
