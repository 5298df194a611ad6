"""Versions of the policy: the actor publishes its weights as files, and the rollout group loads the one that is named.

The actor's own group always has its version. The caller names a version, so that it never is "the newest one". A
rollout group that is lost is started again and loads the same files: no other group is disturbed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from controller.workers.clients import ActorClient, RolloutClient
from controller.workers.command import CommandReply
from controller.workers.concurrency import run_watched
from splitppo.config import Config
from splitppo.config_error import config_errors
from splitppo.rpc.errors import DataLoss, Dirty, NotFound, WireError, WrongStep

log = logging.getLogger(__name__)
T = TypeVar("T")
# (pool, name of the work, reply): records the engine's work on a command.
OnReply = Callable[[str, str, CommandReply], None]
# Raises as soon as a process of the rollout group has ended; never returns.
Watch = Callable[[], Coroutine[Any, Any, NoReturn]]
# Starts the rollout group again; raises the error if it was no loss of the group, or if no restart is left.
Restart = Callable[[Exception], Awaitable[None]]


async def nothing_to_watch() -> NoReturn:
    """Waits forever: nobody notices that the rollout group has ended before a call fails."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nothing resolves it")


async def raise_error(error: Exception) -> None:
    """Raises the error: the rollout group is not started again."""
    raise error


class PublishedVersions:
    """The versions of the policy that the actor has written as files, each named by its sha256."""

    def __init__(self, config: Config, actor: ActorClient, *, has_reader: bool) -> None:
        """`has_reader` is True if a rollout group loads the files."""
        self._config = config
        self._actor = actor
        self._has_reader = has_reader
        self._manifests: dict[int, str] = {}  # sha256 by version
        self._publishing = asyncio.Lock()

    def manifest_of(self, version: int) -> str:
        """Returns the sha256 of a version that was published."""
        return self._manifests[version]

    async def publish(self, version: int, on_reply: OnReply) -> None:
        """Makes the actor publish its weights, which are those of `version`, if somebody needs them."""
        saves = self._config.checkpoint.saves_weights(version)
        if not (self._has_reader or saves):
            return
        keep_from = max(version - self._config.rollout.staleness, 0)
        reply = await self._actor.publish_weights(base_step=version, keep_from=keep_from, save_hf_model=saves)
        self._manifests[version] = reply.result.manifest_sha256
        on_reply("actor", "publish", reply)

    async def publish_once(self, version: int, on_reply: OnReply) -> None:
        """Makes the actor publish a version for the rollout group, unless it is published, or nobody reads it."""
        async with self._publishing:
            if self._has_reader and version not in self._manifests:
                await self.publish(version, on_reply)


class HeldVersion:
    """The version of the policy that the rollout group holds: it is loaded when a call needs another one.

    Args:
        config: names the folder of the files in errors.
        rollout: the client of the rollout group.
        published: the versions that can be loaded.
        watch, restart: see the types.
    """

    def __init__(
        self,
        config: Config,
        rollout: RolloutClient,
        published: PublishedVersions,
        watch: Watch = nothing_to_watch,
        restart: Restart = raise_error,
    ) -> None:
        self._folder_key = "rollout.sync_dir" if config.rollout.sync_dir else "run.dir"
        self._rollout = rollout
        self._published = published
        self._watch = watch
        self._restart = restart
        self._held: tuple[int, int] | None = None  # connection, version
        self._lock = asyncio.Lock()

    async def call(self, version: int, on_reply: OnReply, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Returns the result of `attempt`, which is made while the rollout group holds a version.

        If the group is lost, it is started again, and the attempt is made again, with an empty slot.
        """

        async def hold_and_try() -> T:
            await self.hold(version, on_reply)
            return await attempt()

        while True:
            connection = self._rollout.connection
            try:
                return await run_watched(hold_and_try(), self._watch())
            except WireError as error:
                if error.place.role != self._rollout.role:
                    raise
                async with self._lock:
                    if self._rollout.connection == connection:  # else another call has had it started again
                        await self._restart(error)

    async def hold(self, version: int, on_reply: OnReply) -> None:
        """Makes the rollout group hold a version, which the actor has or has published; it is not loaded twice."""
        async with self._lock:
            if self._held == (self._rollout.connection, version):
                return
            self._held = None
            await self._published.publish_once(version, on_reply)
            expected = f"; expected a folder {self._folder_key} that the actor and the rollout group share"
            try:
                with config_errors(NotFound, after=expected):
                    reply = await self._load(version)
            except DataLoss as error:
                reply = await self._load_again(version, on_reply, error)
            on_reply("rollout", "sync", reply)
            self._held = (self._rollout.connection, version)

    async def _load(self, version: int) -> CommandReply:
        return await self._rollout.sync_weights(version, self._published.manifest_of(version))

    async def _load_again(self, version: int, on_reply: OnReply, damage: DataLoss) -> CommandReply:
        """Publishes a damaged version once more, and loads it; raises Dirty if the actor is at a later step by now.

        Then all roles go back to their last common checkpoint.
        """
        log.warning("publishing the weights of step %d once more: %s", version, damage)
        try:
            await self._published.publish(version, on_reply)
            return await self._load(version)
        except (DataLoss, WrongStep) as error:
            raise Dirty(f"the published weights of step {version} are lost: {damage.message}") from error
