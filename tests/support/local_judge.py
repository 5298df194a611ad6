"""A judge on this machine: an HTTP server in a thread, with the part of OpenAI's API that a judge needs."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(frozen=True)
class Reply:
    """An answer of the server; with status 0 it closes the connection instead."""

    body: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    after_s: float = 0.0


def says(content: str | None, **fields: Any) -> Reply:
    """Returns an answer with a chat completion."""
    completion = {"choices": [{"index": 0, "message": {"role": "assistant", "content": content}}]}
    return Reply(json.dumps(completion), **fields)


HTML = "<!DOCTYPE html>\n<html><body>Sign in\n to the network</body></html>"
SERVER_ERROR = Reply("overloaded", status=500)
CLOSED = Reply("", status=0)

# Returns the answer to a question; the number counts the requests with this question, from 1.
Answer = Callable[[str, int], Reply]


class LocalJudge:
    """Answers questions by the function `answer`; a context manager.

    Attributes:
        url: the address of the server.
        asked: the question of every request, in the order in which they came.
        answered: the questions that got a chat completion.
        bodies, authorizations: the body and the header Authorization of every request.
        most_at_once: the largest number of requests at the same time.
    """

    def __init__(self, answer: Answer) -> None:
        self.asked: list[str] = []
        self.answered: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.most_at_once = 0
        self._num_at_once = 0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _handler(self, answer))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def take(self, body: dict[str, Any], authorization: str | None) -> tuple[str, int]:
        """Records a request; returns its question and how often this question came."""
        question = body["messages"][-1]["content"]
        with self._lock:
            self.bodies.append(body)
            self.asked.append(question)
            self.authorizations.append(authorization)
            self._num_at_once += 1
            self.most_at_once = max(self.most_at_once, self._num_at_once)
            return question, self.asked.count(question)

    def leave(self, question: str, reply: Reply) -> None:
        """Records the end of a request, before its reply is sent."""
        with self._lock:
            self._num_at_once -= 1
            if reply.status == 200 and "choices" in reply.body:
                self.answered.append(question)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores the error of a caller that has closed its connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _handler(judge: LocalJudge, answer: Answer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            question, num_asked = judge.take(body, self.headers["Authorization"])
            reply = answer(question, num_asked) if self.path == "/v1/chat/completions" else Reply("no such path", 404)
            time.sleep(reply.after_s)
            judge.leave(question, reply)
            if reply.status == 0:
                self.close_connection = True
                return
            content = reply.body.encode()
            self.send_response(reply.status)
            for name, value in {**reply.headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            try:
                self.end_headers()
                self.wfile.write(content)
            except OSError:  # the caller has closed the connection
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    return Handler
