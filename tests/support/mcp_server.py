"""A server of MCP's official SDK, as a program: over standard input and output, or with a socket over HTTP.

    python -m tests.support.mcp_server [--socket DESCRIPTOR] [--more] [--pids FILE]

With --more it has one tool more. FILE gets the pids of the server and of a child in a session of its own
that never ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import uvicorn
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from tests.support.groups import PROJECT

server = MCPServer("words", log_level="CRITICAL")


@server.tool()
def lookup(key: str, language: str = "en") -> str:
    """Looks a word up."""
    return f"the value of {key} in {language}"


@server.tool(structured_output=False)
async def trouble(kind: str) -> list[Any]:
    """Is what goes wrong."""
    if kind == "raise":
        raise ToolError("broken")
    if kind == "leave":
        os._exit(3)
    if kind == "hang":
        await asyncio.sleep(1000)
    return [Image(data=b"image", format="png"), "and a text"]


@server.tool()
def pid() -> str:
    """Returns the process of the server."""
    return str(os.getpid())


def more() -> str:
    """Is a tool that is not always there."""
    return "more"


class HttpServer:
    """The server on a port of this machine, as a context manager; it can be killed and started again."""

    def __init__(self) -> None:
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address of the server, which stays the same."""
        return f"http://127.0.0.1:{self._port}/mcp"

    def start(self, *arguments: str) -> Self:
        """Starts the server; who connects waits until it answers."""
        with socket.create_server(("127.0.0.1", self._port)) as listening:
            self._port = listening.getsockname()[1]
            command = [*COMMAND, "--socket", str(listening.fileno()), *arguments]
            self._process = subprocess.Popen(command, pass_fds=[listening.fileno()], cwd=PROJECT)
        return self

    def kill(self) -> None:
        """Kills the server, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


COMMAND = (sys.executable, "-m", "tests.support.mcp_server")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int)
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--pids", type=Path)
    options = parser.parse_args()
    if options.more:
        server.tool()(more)
    if options.pids:
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        options.pids.write_text(f"{os.getpid()} {child.pid}")
    if options.socket is None:
        server.run()
    else:
        uvicorn.run(server.streamable_http_app(), fd=options.socket, log_level="critical")
