"""The server of the endpoint: uvicorn's protocol on a socket of the running event loop."""

import asyncio
import socket
from functools import partial

import uvicorn
from uvicorn.server import ServerState

from environments.gateway.app import make_app
from environments.gateway.connections import Connection
from environments.gateway.keys import Keys

_BACKLOG = 256  # connections that the kernel keeps until they are accepted
_ACCEPTED = 8  # at a time, so that those that are too many are closed before many more are there
_KEEP_ALIVE_S = 3600  # of a connection of a program that asks nothing


class Server:
    """A listening socket, and the keys that let in.

    There is no `uvicorn.Server`, which would take the signals of the process.
    """

    def __init__(self, keys: Keys, state: ServerState, listener: asyncio.Server) -> None:
        self.keys = keys
        self._state = state
        self._listener = listener

    @classmethod
    async def open(cls, host: str, port: int) -> "Server":
        """Listens; OSError or OverflowError: there is no such address, or another process has the port."""
        keys = Keys()
        config = uvicorn.Config(
            make_app(keys),
            access_log=False,
            http=Connection,
            lifespan="off",
            log_config=None,
            log_level="error",  # what is no HTTP is answered, and is no line of a log
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            ws="none",
        )
        config.load()
        state = ServerState()
        protocol = partial(Connection, config=config, server_state=state, app_state={})
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
        listener = await asyncio.get_running_loop().create_server(protocol, sock=listening, backlog=_ACCEPTED)
        listening.listen(_BACKLOG)  # asyncio takes one number for both
        return cls(keys, state, listener)

    @property
    def port(self) -> int:
        """The port, also if a free one was asked for."""
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Closes the socket and all connections, and waits for the requests that they had."""
        self._listener.close()
        for connection in list(self._state.connections):
            connection.transport.abort()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks)
