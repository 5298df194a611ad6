"""Devices that the critic's group and the rollout group share: only one of the two computes at a time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


async def _no_update() -> None:
    pass


class Devices:
    """Gives shared devices to one group at a time; groups that have devices of their own never wait.

    Attributes:
        are_shared: True if the rollout group has the devices of the critic's group.
        after_critic_update: waits for the critic's update of the step before, if it still runs.
    """

    def __init__(self, *, are_shared: bool) -> None:
        self.are_shared = are_shared
        self.after_critic_update: Callable[[], Awaitable[None]] = _no_update
        self._turn = asyncio.Lock()

    def takes_turns(self, role: str) -> bool:
        """Returns True if the group of this role computes on shared devices, so that it needs its turn."""
        return self.are_shared and role in ("critic", "rollout")

    @asynccontextmanager
    async def turn_of(self, role: str) -> AsyncIterator[None]:
        """Gives the group of this role the devices that it shares with another group, while the `with` block runs.

        The rollout group also waits until the critic's group has ended its update of the step before.
        """
        if not self.takes_turns(role):
            yield
            return
        async with self._turn:
            if role == "rollout":
                await self.after_critic_update()
            yield
