"""A channel of ours reaches a server that takes its time for the handshakes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from splitppo.config.subsections.security import SecurityConfig
from splitppo.rpc.credentials import PLAINTEXT, Credentials, load_credentials
from tests.support.certificates import secure

HANDSHAKE_S = 1.5  # longer than any pause between two attempts


@pytest.mark.parametrize("tls", [False, True], ids=["plaintext", "TLS"])
def test_a_server_whose_handshake_takes_longer_than_a_pause_is_reached(tls: bool, tmp_path: Path) -> None:
    server_side = client_side = PLAINTEXT
    if tls:
        security = SecurityConfig(**secure(tmp_path))
        server_side, client_side = (load_credentials(security, role) for role in ("critic", "controller"))
    asyncio.run(reach_slow_server(server_side, client_side))


async def reach_slow_server(server_side: Credentials, client_side: Credentials) -> None:
    """Raises TimeoutError unless a channel connects to a server that says nothing for HANDSHAKE_S at first."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(HANDSHAKE_S)
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, server_writer), copy(server_reader, writer))

    server = grpc.aio.server()
    port = server_side.listen(server, "127.0.0.1:0")
    await server.start()
    slow = await asyncio.start_server(relay, "127.0.0.1", 0)
    channel = client_side.channel(f"127.0.0.1:{slow.sockets[0].getsockname()[1]}")
    try:
        await asyncio.wait_for(channel.channel_ready(), 20.0)
    finally:
        await channel.close()
        slow.close()
        await server.stop(None)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()
