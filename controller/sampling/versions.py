"""The worker groups that sample responses, brought to the version of the policy that a caller needs.

The actor's own group always has its version. A rollout group gets it by files: the actor publishes its weights, then
the group loads them. The controller names the version, so that it never is "the newest one". A rollout group that is
lost is started again, and loads the same files: no other group is disturbed. On devices of the critic's group it takes
turns with that group.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, NoReturn, TypeVar

from controller.workers.clients import ActorClient, RolloutClient, SamplerClient, WorkerClient
from controller.workers.command import CommandReply
from controller.workers.concurrency import run_watched
from splitppo.config import Config
from splitppo.config_error import config_errors
from splitppo.rpc.errors import DataLoss, Dirty, NotFound, WireError, WrongStep

log = logging.getLogger(__name__)
T = TypeVar("T")
# (pool, name of the work, reply): records the engine's work on a command.
OnReply = Callable[[str, str, CommandReply], None]


async def _nothing_to_watch() -> NoReturn:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nothing resolves it")


async def _no_update() -> None:
    pass


async def raise_error(error: Exception) -> None:
    """Raises the error: the rollout group is not started again."""
    raise error


@dataclass(eq=False)
class Sampler:
    """The groups that sample, and the versions of the policy that were published for the rollout group.

    Attributes:
        rollout: None if the actor's group alone samples.
        watch: raises as soon as a process of the rollout group has ended; never returns.
        restart: starts the rollout group again, and connects it; raises the error if it was no loss of the group, or if
            no restart is left.
        after_critic_update: waits for the critic's update of the step before, if it still runs.
    """

    config: Config
    actor: ActorClient
    rollout: RolloutClient | None = None
    _: KW_ONLY
    watch: Callable[[], Coroutine[Any, Any, NoReturn]] = _nothing_to_watch
    restart: Callable[[Exception], Awaitable[None]] = raise_error
    after_critic_update: Callable[[], Awaitable[None]] = _no_update

    def __post_init__(self) -> None:
        self._manifests: dict[int, str] = {}  # sha256 by version
        self._held: tuple[int, int] | None = None  # connection, version
        self._lock = asyncio.Lock()
        self._publishing = asyncio.Lock()
        self._turn = asyncio.Lock()

    @property
    def share(self) -> float:
        """The share of the prompts that the rollout group answers, from 0 to 1; the actor's group answers the rest."""
        assert self.config.rollout.share != "auto", "load resolves it"
        return 0.0 if self.rollout is None else self.config.rollout.share

    def takes_turns(self, client: WorkerClient) -> bool:
        """Returns True if this group and another one share devices, so that only one of them computes at a time."""
        shares = self.rollout is not None and self.config.rollout_shares_devices
        return shares and client.role in ("critic", "rollout")

    @asynccontextmanager
    async def turn_of(self, client: WorkerClient) -> AsyncIterator[None]:
        """Gives a group the devices that it shares with another group, while the `with` block runs."""
        if not self.takes_turns(client):
            yield
            return
        async with self._turn:
            yield

    async def publish(self, version: int, on_reply: OnReply) -> None:
        """Makes the actor publish its weights, which are those of `version`, if somebody needs them."""
        saves = self.config.checkpoint.saves_weights(version)
        if self.rollout is None and not saves:
            return
        keep_from = max(version - self.config.rollout.staleness, 0)
        reply = await self.actor.publish_weights(base_step=version, keep_from=keep_from, save_hf_model=saves)
        self._manifests[version] = reply.result.manifest_sha256
        on_reply("actor", "publish", reply)

    async def sample(
        self, client: SamplerClient, version: int, on_reply: OnReply, attempt: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Returns the result of `attempt`, which samples by `client` with the policy of `version`.

        After the loss of the rollout group the attempt is made again, with an empty slot. On the critic's devices, the
        critic's update of the step before ends first.
        """
        if self.rollout is None or client is not self.rollout:
            await self._publish_once(version, on_reply)  # before the actor's group is busy
            return await attempt()
        async with self.turn_of(client):
            if self.takes_turns(client):
                await self.after_critic_update()
            return await self._sample(self.rollout, version, on_reply, attempt)

    async def _sample(
        self, rollout: RolloutClient, version: int, on_reply: OnReply, attempt: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        async def hold_and_try() -> T:
            await self.hold(rollout, version, on_reply)
            return await attempt()

        while True:
            connection = rollout.connection
            try:
                return await run_watched(hold_and_try(), self.watch())
            except WireError as error:
                if error.place.role != rollout.role:
                    raise
                async with self._lock:
                    if rollout.connection == connection:  # else another call has had it started again
                        await self.restart(error)

    async def hold(self, rollout: RolloutClient, version: int, on_reply: OnReply) -> None:
        """Makes the rollout group hold a version, which the actor has or has published; it is not loaded twice."""
        async with self._lock:
            if self._held == (rollout.connection, version):
                return
            self._held = None
            await self._publish_once(version, on_reply)
            key = "rollout.sync_dir" if self.config.rollout.sync_dir else "run.dir"
            expected = f"; expected a folder {key} that the actor and the rollout group share"
            try:
                with config_errors(NotFound, after=expected):
                    reply = await rollout.sync_weights(version, self._manifests[version])
            except DataLoss as error:
                reply = await self._load_again(rollout, version, on_reply, error)
            on_reply("rollout", "sync", reply)
            self._held = (rollout.connection, version)

    async def _publish_once(self, version: int, on_reply: OnReply) -> None:
        async with self._publishing:
            if self.rollout is not None and version not in self._manifests:
                await self.publish(version, on_reply)

    async def _load_again(
        self, rollout: RolloutClient, version: int, on_reply: OnReply, damage: DataLoss
    ) -> CommandReply:
        """Publishes a damaged version once more, and loads it; raises Dirty if the actor is at a later step by now.

        Then all roles go back to their last common checkpoint.
        """
        log.warning("publishing the weights of step %d once more: %s", version, damage)
        try:
            await self.publish(version, on_reply)
            return await rollout.sync_weights(version, self._manifests[version])
        except (DataLoss, WrongStep) as error:
            raise Dirty(f"the published weights of step {version} are lost: {damage.message}") from error
