"""No proxy sees a call, whatever the environment names."""

from __future__ import annotations

import socket

import grpc
import pytest

from splitppo.rpc.credentials import Credentials


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_a_proxy_of_the_environment_is_not_asked(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as proxy, socket.create_server(("127.0.0.1", 0)) as service:
        monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        service.settimeout(20)
        with Credentials().channel(f"127.0.0.1:{service.getsockname()[1]}", grpc) as channel:
            ready = grpc.channel_ready_future(channel)  # connects
            connection, _ = service.accept()
            connection.close()
            ready.cancel()
        proxy.settimeout(0)
        with pytest.raises(BlockingIOError):
            proxy.accept()
