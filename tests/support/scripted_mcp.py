"""A server of MCP over HTTP that does what a call says, also what no server should."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

TOOL = {"name": "do", "inputSchema": {"type": "object", "properties": {"kind": {"type": "string"}}}}
NUM_MEETING = 120


class ScriptedServer(ThreadingHTTPServer):
    """A server on a port of this machine, as a context manager.

    Attributes:
        tools: what it lists.
        is_waiting: set when a call `wait` has come.
        may_go_on: lets the calls `wait` be answered.
        meeting: where calls `meet` wait for all others.
        num_sessions: how many have been opened.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (TOOL,)) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.daemon_threads = True
        self.request_queue_size = NUM_MEETING
        self.socket.listen(NUM_MEETING)
        self.tools = tools
        self.is_waiting, self.may_go_on = threading.Event(), threading.Event()
        self.meeting = threading.Barrier(NUM_MEETING, timeout=60.0)
        self.num_sessions = 0

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://127.0.0.1:{self.server_port}/mcp"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.may_go_on.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        match message["method"]:
            case "initialize":
                self.server.num_sessions += 1
                version, info = message["params"]["protocolVersion"], {"name": "scripted", "version": "1"}
                result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
                self._answer(message, result=result)
            case "tools/list":
                self._answer(message, result={"tools": [*self.server.tools]})
            case "tools/call":
                self._call(message, message["params"]["arguments"]["kind"])
            case _ if "id" in message:
                self._answer(message, error={"code": -32601, "message": "Method not found"})
            case _:
                self._send(202)

    def _call(self, message: Mapping[str, Any], kind: str) -> None:
        token = self.headers["Authorization"]
        match kind:
            case "close":
                self.close_connection = True
            case "half":
                self._send(200, b"{", num_bytes=1000)
                self.close_connection = True
            case "404" | "202":
                self._send(int(kind))
            case "html":
                self._send(200, b"<html>", content_type="text/html")
            case "refuse":
                self._answer(message, error={"code": -32001, "message": f"bad {token}"})
            case "fail":
                self._answer(message, result={"content": [{"type": "text", "text": f"bad {token}"}], "isError": True})
            case _:
                if kind == "wait":
                    self.server.is_waiting.set()
                    self.server.may_go_on.wait()
                if kind == "meet":
                    self.server.meeting.wait()
                text = self.headers["Mcp-Session-Id"]
                self._answer(message, result={"content": [{"type": "text", "text": text}]})

    def _answer(self, message: Mapping[str, Any], **content: Any) -> None:
        self._send(200, json.dumps({"jsonrpc": "2.0", "id": message["id"], **content}).encode())

    def _send(
        self, status: int, body: bytes = b"", *, content_type: str = "application/json", num_bytes: int | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(num_bytes or len(body)))
        self.send_header("Mcp-Session-Id", f"session {self.server.num_sessions}")
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._send(405)

    def do_DELETE(self) -> None:
        self._send(200)

    def log_message(self, *_: object) -> None:
        pass
