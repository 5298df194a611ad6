"""A W&B server with the part of the API that the client uses while a run is logged."""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.groups import free_address

_ENTITY = {"id": "e", "name": "me"}
_PROJECT = {"id": "p", "name": "proofs", "entity": _ENTITY}


class WandbServer:
    """Keeps the history of one run; may go away and come back under the same address, knowing what it knew."""

    def __init__(self) -> None:
        self.history: list[str] = []
        self.exit_codes: list[int] = []
        self._run_name: str | None = None
        self._server: ThreadingHTTPServer | None = None
        self._port = int(free_address().rpartition(":")[2])  # which nobody else gets while the server is away
        self.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def steps(self) -> list[int]:
        """The steps in the order in which they are kept."""
        return [json.loads(line)["_step"] for line in self.history]

    def start(self) -> None:
        """Listens."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Refuses connections from now on."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a POST."""
        if path == "/graphql":
            return {"data": self._data(str(request.get("operationName")), request.get("variables") or {})}
        if lines := request.get("files", {}).get("wandb-history.jsonl"):
            self.history[lines["offset"] :] = lines["content"]
        if request.get("complete"):
            self.exit_codes.append(request["exitcode"])
        return {}

    def _data(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        match operation:
            case "Viewer":
                return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
            case "RunResumeStatus":
                return {"model": {**_PROJECT, "bucket": self._bucket()}}
            case "UpsertBucket":
                is_new, self._run_name = self._run_name is None, variables["name"]
                return {"upsertBucket": {"bucket": {**self._bucket(), "project": _PROJECT}, "inserted": is_new}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.address}/{name}"} for name in variables["files"]]
                return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
            case "CreateArtifact":
                artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": {"latestArtifact": {"id": "a"}}}
                return {"createArtifact": {"artifact": artifact}}
        return {"project": {"artifact": None}}

    def _bucket(self) -> Any:
        if self._run_name is None:
            return None
        return {
            "id": "r",
            "name": self._run_name,
            "displayName": "proof",
            "config": "{}",
            "wandbConfig": '{"t": 1}',
            "summaryMetrics": self.history[-1] if self.history else "{}",
            "historyTail": json.dumps(self.history[-1:]),
            "eventsTail": "[]",
            "historyLineCount": len(self.history),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "tags": [],
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                content = gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content
                is_json = content.startswith(b"{")  # the client's own measurements are not
                self._reply(server.answer(self.path, json.loads(content)) if is_json else {})

            def do_PUT(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self._reply({})

            def do_GET(self) -> None:
                self._reply({})

            def _reply(self, answer: dict[str, Any]) -> None:
                content = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
                pass

        return Handler
