"""The built-in environment `openenv`: a session with a server of OpenEnv, by its WebSocket."""

import json
from collections.abc import Mapping
from typing import Any

import httpx2
from websockets.asyncio.client import ClientConnection, connect

from environments.chat import Step
from environments.tool_calls.json_calls import read_value
from splitppo.config_error import config_errors

_START_LIMIT_S = 10.0  # for the server's first sign of life


class Adapter:
    """A session with an environment that an OpenEnv server holds; OpenEnv itself need not be installed.

    Observations are the user's messages, and the model's turns actions. Thoughts, up to </think>, are no action.

    Args:
        url: the address of the server, e.g. http://127.0.0.1:8000.
        action_field: the field of an action that a turn's text becomes; None: a turn has the action as a JSON object.
        observation_field: the field of an observation that the model reads; None: all of them, as JSON.
    """

    def __init__(self, url: str, action_field: str | None = "message", observation_field: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._fields = {"action": action_field, "observation": observation_field}
        self._socket: ClientConnection | None = None

    def check(self) -> None:
        """Checks that the server answers, and that actions and observations have these fields."""
        problems = httpx2.HTTPError, httpx2.InvalidURL, ValueError, LookupError, TypeError
        with config_errors(*problems, before=f"no OpenEnv server answers at {self._url}: "):
            schema = httpx2.get(f"{self._url}/schema", timeout=_START_LIMIT_S).raise_for_status().json()
            known = {kind: list(schema[kind]["properties"]) for kind in self._fields}
        for kind, field in self._fields.items():
            if field not in (None, *known[kind]):
                raise ValueError(f"{kind}_field: expected one of {', '.join(known[kind])}, got {field!r}")

    async def reset(self, **row: Any) -> str:
        """Opens the session, and begins with the seed and the row's fields; the server takes those that it knows."""
        self._socket = await connect(f"ws{self._url.removeprefix('http')}/ws", max_size=100 << 20, ping_interval=None)
        return (await self._ask("reset", row)).text

    async def step(self, text: str) -> Step:
        """Takes the action of a turn; a turn that is none is told so, and changes nothing."""
        said = text.rpartition("</think>")[2].strip()
        field = self._fields["action"]
        try:
            action = read_value(said) if field is None else {field: said}
        except ValueError:
            return Step(f"expected an action as a JSON object, got: {said}")
        return await self._ask("step", action)

    async def close(self) -> None:
        """Ends the session."""
        if self._socket is not None:
            await self._socket.close()

    async def _ask(self, kind: str, content: Any) -> Step:
        """Sends a message to the server and returns its answer as a step.

        An action that the server finds invalid is no failure: the model is told what was wrong with it. Any other error
        raises RuntimeError.
        """
        assert self._socket is not None, "reset comes first"
        await self._socket.send(json.dumps({"type": kind, "data": content}, default=str))
        answer = json.loads(await self._socket.recv())
        told: Mapping[str, Any] = answer["data"]
        if told.get("code") == "VALIDATION_ERROR" and kind == "step":
            errors = told.get("errors") or [{"msg": told.get("message")}]
            wrong = (f"{'.'.join(map(str, one.get('loc', ()))) or 'action'}: {one.get('msg')}" for one in errors)
            return Step("; ".join(wrong))
        if answer["type"] == "error":
            message = " ".join(str(told.get("message")).split())[:300]
            raise RuntimeError(f"{self._url} says {told.get('code')}: {message}")
        observation = told["observation"]
        field = self._fields["observation"]
        text = json.dumps(observation, ensure_ascii=False) if field is None else observation[field]
        return Step(text, float(told.get("reward") or 0.0), told.get("done") is True)
