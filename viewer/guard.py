"""Decides who may ask the server: a browser on this machine that has the token, from the viewer's own pages."""

import hmac
import re
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OF_OWNER = "of_owner"  # in a request's state: what is called when the request has the token
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_PATH = re.compile(rb"/[a-z0-9_./-]{0,300}")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Answers what must not reach the pages: 405, 421, 403, 404 or 401; sets the headers of all answers."""

    def __init__(self, app: ASGIApp, *, token: str, allowed_hosts: Collection[str] = ()) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()
        self._hosts = LOOPBACK_NAMES.union(host.lower() for host in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through to the pages or answers it with a refusal; what is no HTTP gets no answer.

        `OF_OWNER`, if the server has put it into the request's state, is called for each request with the token: the
        owner is there.
        """
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None  # no websockets here

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(scope)
        of_owner = scope.get("state", {}).get(OF_OWNER)
        if refusal is None and of_owner and self._has_token(Headers(scope=scope)):
            of_owner()
        answer = self._app if refusal is None else JSONResponse({"error": refusal[1]}, refusal[0])
        return await answer(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Returns (HTTP status, sentence) for a request that is refused, else None."""
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "The viewer only shows: GET and HEAD."
        host = headers.getlist("host")
        if len(host) != 1 or re.sub(r":\d+$", "", host[0].lower()) not in self._hosts:
            return 421, "The viewer answers to localhost; --allowed-host adds a name."
        site = headers.get("sec-fetch-site", "none")
        origins = (None, f"http://{host[0]}", f"https://{host[0]}")
        if site not in ("same-origin", "none") or headers.get("origin") not in origins:
            return 403, "Another site asked."
        path: bytes = scope["raw_path"]
        if not _PATH.fullmatch(path) or b".." in path or b"//" in path:
            return 404, "There is no such page."
        if path.startswith(b"/api/") and not self._has_token(headers):
            return 401, "The token is missing or wrong: open the address that the viewer printed when it started."
        return None

    def _has_token(self, headers: Headers) -> bool:
        return hmac.compare_digest(headers.get("authorization", "").encode("latin-1"), self._expected)
