"""Tools of an MCP server: a process has one session with it, which is opened again when it is needed after a loss."""

import asyncio
import os
import shlex
import shutil
import sys
from functools import partial
from typing import Any

import httpx2
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST

from environments.adapters.variables import filled
from environments.loops import EnvironmentFailed
from environments.tools import Tool, message_of
from splitppo.config.subsections.multi_turn import MultiTurnConfig
from splitppo.config_error import ConfigError


class Server:
    """An MCP server; ConfigError if an environment variable or a program that its configuration names is missing."""

    def __init__(self, name: str, config: MultiTurnConfig) -> None:
        self._key, self._limit_s = f"rollout.multi_turn.mcp_servers.{name}", config.timeout_s
        own, self._known = config.mcp_servers[name], config.mcp_tools.get(name)
        if own.command and shutil.which(own.command[0]) is None:
            raise ConfigError(f"key '{self._key}.command': there is no program {own.command[0]!r}")
        self._where = own.url or shlex.join(own.command)
        url = filled(own.url or "", f"{self._key}.url")
        headers = {header: filled(value, f"{self._key}.headers") for header, value in own.headers.items()}
        http = httpx2.AsyncClient(headers=headers, timeout=None)
        call = f"import sys; sys.path[:] = {sys.path!r}; from rewards.channel import run_with; run_with({os.getpid()})"
        arguments = ["-P", "-c", call, *own.command]
        child = StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))
        self._connect = partial(streamable_http_client, url, http_client=http) if url else partial(stdio_client, child)
        self._is_lost = asyncio.Event()
        self._is_lost.set()

    async def tools(self) -> list[Tool]:
        """Returns the tools that the run began with; if it begins, the server lists them; ConfigError: it does not."""
        try:
            known = self._known if self._known is not None else await self._open() and self._known
        except Exception as error:
            reason = f"no answer within {self._limit_s:g} s" if isinstance(error, TimeoutError) else message_of(error)
            raise ConfigError(f"{self._key}: {self._where} cannot be used: {reason}") from error
        return [Tool(partial(self._call, name), schema) for name, schema in (known or {}).items()]

    async def _call(self, name: str, /, **arguments: Any) -> Any:
        client, is_lost = await self._open(), self._is_lost
        try:
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code in (CONNECTION_CLOSED, INVALID_REQUEST):  # the latter: a server that was started again
                is_lost.set()
            raise
        no_text = "({} left out: only text can be shown)"
        parts = (getattr(getattr(one, "resource", one), "text", no_text.format(one.type)) for one in result.content)
        text = "\n".join(parts)
        if result.is_error:
            raise RuntimeError(text)
        return text or result.structured_content or ""

    async def _open(self) -> Client:
        if self._is_lost.is_set():
            self._session, self._is_lost = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._keeper = asyncio.create_task(self._keep(self._session, self._is_lost))
        return await asyncio.shield(self._session)

    async def _keep(self, session: "asyncio.Future[Client]", is_lost: asyncio.Event) -> None:
        """Opens a session and keeps it until it is lost; the SDK wants the task that opened it to close it."""
        problem: Exception = ConnectionError("the connection was lost")
        try:
            async with asyncio.timeout(self._limit_s) as opening, Client(self._connect()) as client:
                tools = await _listed(client)
                known = self._known = tools if self._known is None else self._known
                if changed := [name for name in {**known, **tools} if known.get(name) != tools.get(name)]:
                    raise EnvironmentFailed(f"{self._key}: tools changed since the run began: {', '.join(changed)}")
                opening.reschedule(None)
                session.set_result(client)
                await is_lost.wait()
        except Exception as error:  # noqa: BLE001 - the SDK passes errors of its transports on
            problem = error
        is_lost.set()
        while isinstance(problem, ExceptionGroup):
            problem = problem.exceptions[0]
        if not session.done():
            session.set_exception(problem)


async def _listed(client: Client) -> dict[str, Any]:
    pages = [await client.list_tools()]
    while cursor := pages[-1].next_cursor:
        pages.append(await client.list_tools(cursor=cursor))
    tools = sorted((tool for page in pages for tool in page.tools), key=lambda tool: tool.name)
    written = {tool.name: {"description": tool.description or "", "parameters": tool.input_schema} for tool in tools}
    return {name: {"type": "function", "function": {"name": name, **tool}} for name, tool in written.items()}
