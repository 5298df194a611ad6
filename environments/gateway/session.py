"""The endpoint of an environment process, and the part of it that belongs to one conversation.

program  -- POST /v1/chat/completions -->  app.py       finds the conversation of the key
                                           dialogue.py  a repeat, or a question that is asked when its turn comes
                                           history.py   finds the context that the question belongs to
policy   <-- Chat.turn, Chat.restart ----
"""

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from environments.chat import Chat
from environments.gateway.dialogue import Dialogue
from environments.gateway.keys import Keys
from environments.gateway.questions import MODEL, Refused
from splitppo.config_error import ConfigError, config_errors
from splitppo.our_commands import missing_package

if TYPE_CHECKING:
    from environments.gateway.server import Server

_KEY = "rollout.multi_turn.gateway"


@dataclass(frozen=True)
class Endpoint:
    """The things that a program needs to talk with the policy: where, with which key, and a name for the policy."""

    base_url: str
    api_key: str
    model: str = MODEL


class Session:
    """The conversation that one program leads through the gateway.

    Attributes:
        endpoint: what the program is given.
        reward_key: a second key, with which a reward can be posted; refused unless the session takes rewards.
        posted: the reward that was posted last, an object with `score`; None: none was.
    """

    def __init__(self, keys: Keys, chat: Chat, base_url: str, name: str, *, takes_rewards: bool) -> None:
        self.endpoint = Endpoint(base_url, _new_key())
        self.reward_key = _new_key()
        self.posted: Any = None
        self._takes_rewards = takes_rewards
        self._dialogue = Dialogue(chat, name)
        self._keys = keys
        self._keys.dialogues[self.endpoint.api_key] = self._dialogue
        self._keys.rewards[self.reward_key] = self._take_reward

    @property
    def began(self) -> asyncio.Event:
        """Set as soon as the first request is asked of the policy."""
        return self._dialogue.began

    @property
    def is_over(self) -> asyncio.Event:
        """Set if the policy has no further turn, or the conversation has failed."""
        return self._dialogue.is_over

    @property
    def asks_on(self) -> asyncio.Event:
        """Set if the program goes on to ask after it was told, often enough, that the policy has no further turn."""
        return self._dialogue.asks_on

    @property
    def failure(self) -> Exception | None:
        """The exception that ended the conversation, which is not the program's doing; None: there is none."""
        return self._dialogue.failure

    @property
    def refused(self) -> str:
        """The reason why the latest request was refused, as it is written wrongly; empty: it was not."""
        return self._dialogue.refused

    def restarted(self) -> None:
        """The program was started again: its requests are answered from what was said, from the first."""
        self._dialogue.restarted()

    def close(self) -> None:
        """Ends the conversation: the keys are dead, and requests that wait are refused."""
        self._keys.dialogues.pop(self.endpoint.api_key, None)
        self._keys.rewards.pop(self.reward_key, None)
        self._dialogue.close()

    def _take_reward(self, reward: Any) -> None:
        if not self._takes_rewards:
            raise Refused(403, "no_rewards", "rewards by request do not count here: the configuration has another way")
        self.posted = reward


class Gateway:
    """The endpoint of a process, in its running event loop.

    Attributes:
        base_url: the address that programs are given; it ends in /v1.
    """

    def __init__(self, server: "Server", base_url: str) -> None:
        self.base_url = base_url
        self._server = server
        self._num_sessions = 0

    @classmethod
    async def open(cls, host: str, port: int) -> "Gateway":
        """Opens the endpoint; port 0 takes a free one.

        Raises:
            ConfigError: its packages are missing, or nobody can listen there.
        """
        try:
            from environments.gateway.server import Server
        except ModuleNotFoundError as error:
            raise ConfigError(f"{_KEY}: {missing_package(error.name, 'agents')}") from error
        with config_errors(OSError, OverflowError, before=f"{_KEY}: {host}, port {port}: "):
            server = await Server.open(host, port)
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
        name = f"[{reachable}]" if ":" in reachable else reachable
        return cls(server, f"http://{name}:{server.port}/v1")

    def session(self, chat: Chat, *, takes_rewards: bool = False) -> Session:
        """Returns the session of a conversation, with keys of its own; `takes_rewards`: rewards by request count."""
        self._num_sessions += 1
        name = f"conversation {self._num_sessions}"
        return Session(self._server.keys, chat, self.base_url, name, takes_rewards=takes_rewards)

    @property
    def ignored(self) -> Mapping[str, int]:
        """How often requests have set parameters that change nothing."""
        return self._server.keys.ignored

    async def close(self) -> None:
        """Closes the endpoint with all its connections."""
        await self._server.close()


def _new_key() -> str:
    return f"sk-{secrets.token_urlsafe(24)}"
