"""The HTTP client of sessions with MCP servers, and the list of a server's tools."""

import logging
from collections import Counter
from typing import Any

import httpx2
from mcp import Client
from mcp_types import CONNECTION_CLOSED

for _name in ("mcp", "httpx2"):  # a server may make them log for each line that it writes, and addresses with secrets
    logging.getLogger(_name).setLevel(logging.CRITICAL)


class Http(httpx2.AsyncClient):
    """Answers a request whose connection breaks with an error of that request; else the SDK ends all in the session."""

    async def send(self, request: httpx2.Request, **how: Any) -> httpx2.Response:
        """Sends a request."""
        try:
            response = await super().send(request, **how)
            if "json" in response.headers.get("content-type", ""):
                await response.aread()
            return response
        except httpx2.RequestError as error:
            broken = {"code": CONNECTION_CLOSED, "message": str(error) or "Connection closed"}
            return httpx2.Response(502, request=request, json={"jsonrpc": "2.0", "id": None, "error": broken})


async def tools_of(client: Client) -> dict[str, Any]:
    """Returns the schemas of a server's tools, by their names; ValueError: it has two of one name."""
    pages = [await client.list_tools()]
    while cursor := pages[-1].next_cursor:
        pages.append(await client.list_tools(cursor=cursor))
    tools = sorted((tool for page in pages for tool in page.tools), key=lambda tool: tool.name)
    if wrong := [name for name, count in Counter(tool.name for tool in tools).items() if count > 1 or not name]:
        raise ValueError(f"expected names of tools that differ and are not empty, got {wrong[0]!r}")
    written = {tool.name: {"description": tool.description or "", "parameters": tool.input_schema} for tool in tools}
    return {name: {"type": "function", "function": {"name": name, **tool}} for name, tool in written.items()}
