"""Tools of an MCP server: a process has one session with it, which is opened again when it is needed after a loss."""

import asyncio
import os
import shlex
import shutil
from functools import partial
from typing import Any

import httpx2
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST

from environments.adapters.mcp_client import Http, tools_of
from environments.adapters.variables import filled, without_secrets
from environments.loops import EnvironmentFailed
from environments.tools import Tool, message_of
from splitppo.config.subsections.multi_turn import MultiTurnConfig
from splitppo.config_error import ConfigError
from splitppo.machine.children.supervisor import supervised


class Server:
    """An MCP server; ConfigError if an environment variable or a program that its configuration names is missing."""

    def __init__(self, name: str, config: MultiTurnConfig) -> None:
        """Checks how the server is reached, by a command or a URL; it is not asked before the first call or listing.

        A command is run by a process that ends with this one. Secrets in URL and headers are filled in from the
        environment.
        """
        self._key = f"rollout.multi_turn.mcp_servers.{name}"
        self._limit_s = config.timeout_s
        own = config.mcp_servers[name]
        self._known = config.mcp_tools.get(name)
        if own.command and shutil.which(own.command[0]) is None:
            raise ConfigError(f"key '{self._key}.command': there is no program {own.command[0]!r}")
        self._where = own.url or shlex.join(own.command)
        url = filled(own.url or "", f"{self._key}.url")
        headers = {header: filled(value, f"{self._key}.headers") for header, value in own.headers.items()}
        http = Http(headers=headers, timeout=None, limits=httpx2.Limits())  # no limits
        program, *arguments = supervised(own.command, os.getpid())
        child = StdioServerParameters(command=program, args=arguments, env=dict(os.environ))
        self._dial = partial(streamable_http_client, url, http_client=http) if own.url else partial(stdio_client, child)
        self._signs = (CONNECTION_CLOSED, INVALID_REQUEST) if own.url else (CONNECTION_CLOSED,)
        self._session: tuple[asyncio.Future[Client], asyncio.Event] | None = None

    async def tools(self) -> list[Tool]:
        """Returns the tools that the run began with; if it begins, the server lists them; ConfigError: it does not."""
        try:
            known = self._known if self._known is not None else await self._open()[0] and self._known
        except Exception as error:
            reason = f"no answer within {self._limit_s:g} s" if isinstance(error, TimeoutError) else message_of(error)
            in_one_line = " ".join(without_secrets(reason).split())[:300]
            raise ConfigError(f"{self._key}: {self._where} cannot be used: {in_one_line}") from error
        return [Tool(partial(self._call, name), schema) for name, schema in (known or {}).items()]

    async def _call(self, name: str, /, **arguments: Any) -> Any:
        """Calls a tool of the server and returns its text, else its structured content.

        An error of the tool or the connection raises RuntimeError with the reason. If the error shows that the session
        is lost, the next call opens another one.
        """
        client, is_lost = self._open()
        try:
            result = await (await asyncio.shield(client)).call_tool(name, arguments)
        except (MCPError, ValueError, OSError) as error:
            if isinstance(error, MCPError) and error.code in self._signs:
                is_lost.set()
            raise RuntimeError(without_secrets(message_of(error))) from error
        no_text = "({} left out: only text can be shown)"
        parts = (getattr(getattr(one, "resource", one), "text", no_text.format(one.type)) for one in result.content)
        text = "\n".join(parts)
        if result.is_error:
            raise RuntimeError(without_secrets(text))
        return text or result.structured_content or ""

    def _open(self) -> "tuple[asyncio.Future[Client], asyncio.Event]":
        """Returns the session of this process, a future, and the event that it is lost; opens one if needed."""
        if self._session is None or self._session[1].is_set():
            self._session = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._keeper = asyncio.create_task(self._keep(*self._session))
        return self._session

    async def _keep(self, session: "asyncio.Future[Client]", is_lost: asyncio.Event) -> None:
        """Opens a session and keeps it until it is lost; the SDK wants the task that opened it to close it."""
        problem: Exception = ConnectionError("the connection was lost")
        try:
            async with asyncio.timeout(self._limit_s) as opening, Client(self._dial()) as client:
                tools = await tools_of(client)
                known = self._known = tools if self._known is None else self._known
                if changed := [name for name in {**known, **tools} if known.get(name) != tools.get(name)]:
                    raise EnvironmentFailed(f"{self._key}: tools changed since the run began: {', '.join(changed)}")
                opening.reschedule(None)
                session.set_result(client)
                await is_lost.wait()
                await asyncio.sleep(self._limit_s)  # until all calls in it have ended
        except Exception as error:  # noqa: BLE001 - the SDK passes errors of its transports on
            problem = error
        is_lost.set()
        while isinstance(problem, ExceptionGroup):
            problem = problem.exceptions[0]
        if not session.done():
            session.set_exception(problem)
