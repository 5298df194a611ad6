"""A child process that is started while channels are open."""

from __future__ import annotations

import subprocess
import sys

import pytest

FORKS = """
import asyncio, os, {module}
import grpc.aio

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        await channel.channel_ready()
        for _ in range(20):
            if (pid := os.fork()) == 0:
                os._exit(0)
            os.waitpid(pid, 0)
    await server.stop(0)

asyncio.run(main())
"""


@pytest.mark.parametrize("module", ["controller.__main__", "services.actor.__main__"])
def test_grpc_says_nothing_about_children(module: str) -> None:
    command = [sys.executable, "-c", FORKS.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "fork" not in done.stderr
