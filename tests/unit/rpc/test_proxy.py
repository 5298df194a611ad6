"""Calls never use a proxy, whatever the environment names."""

from __future__ import annotations

import asyncio
import socket

import grpc.aio
import pytest

from splitppo.rpc.credentials import Credentials


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
async def test_a_proxy_of_the_environment_is_not_asked(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as proxy, socket.create_server(("127.0.0.1", 0)) as service:
        monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        service.settimeout(20)
        # Not grpc's own channel: its thread that looks for a connection may outlive the channel, and then it fails.
        async with Credentials().channel(f"127.0.0.1:{service.getsockname()[1]}", grpc.aio) as channel:
            channel.get_state(try_to_connect=True)
            connection, _ = await asyncio.to_thread(service.accept)
            connection.close()
        proxy.settimeout(0)
        with pytest.raises(BlockingIOError):
            proxy.accept()
