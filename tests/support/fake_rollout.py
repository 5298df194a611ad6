"""A fake rollout group without processes, which can be lost and started again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from controller.workers.clients import Caller, RolloutClient
from controller.workers.command import CommandReply
from controller.workers.recovery import RECOVERABLE
from tests.support.call_log import CallLog
from tests.support.fake_services import FakeSampler, manifest_of


class FakeRollout(FakeSampler, RolloutClient):
    """A client of a rollout group; `restart` gives it a new connection to a group that holds no weights."""

    role = "rollout"

    def __init__(self, log: CallLog) -> None:
        super().__init__(log)
        self.committed_step = -1
        self.restarts: list[Exception] = []
        self._caller = Caller("run", 1, connection=1)

    async def sync_weights(self, version: int, manifest_sha256: str) -> CommandReply:
        assert manifest_sha256 == manifest_of(version)
        return await self._run("sync_weights", version, self.committed_step, lambda: self._commit(version))

    async def restart(self, error: Exception) -> None:
        """Starts the group again, as `Restart` of its versions."""
        if not isinstance(error, RECOVERABLE):
            raise error
        await asyncio.sleep(0)
        self.restarts.append(error)
        self._slots.clear()
        self.committed_step = -1
        self._caller = replace(self._caller, connection=self.connection + 1)
