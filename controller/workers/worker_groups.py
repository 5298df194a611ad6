"""Starts and connects all worker groups of a run, watches them, restores them to one step, and recovers lost groups."""

import asyncio
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, Self, TypeVar

from controller.workers.clients import ActorClient, Caller, CriticClient, RewardClient, RolloutClient, WorkerClient
from controller.workers.command import CommandReply, Limits, ProgressCallback
from controller.workers.concurrency import gather_calls, run_watched
from controller.workers.launcher import LocalLauncher
from controller.workers.local_group import GroupFailed, LocalGroup
from controller.workers.recovery import LOST_GROUP, RECOVERABLE, ends_by_restart
from splitppo.config import Config, ConfigError
from splitppo.config.section import ROLES, RoleName
from splitppo.config.worker_digest import worker_digest
from splitppo.manifest import DamagedCheckpoint, Manifest
from splitppo.rpc.bearer_tokens import RUN_TOKEN_VARIABLE
from splitppo.rpc.credentials import load_credentials
from splitppo.rpc.errors import AccessDenied, DataLoss, InvalidArgument, NotFound, Place, Unavailable, WrongState
from splitppo.run_folder.end_reason import read_end_reason
from splitppo.run_folder.spans import Span

log = logging.getLogger(__name__)
Client = TypeVar("Client", bound=WorkerClient)

WATCH_INTERVAL_S = 0.2
# The additional time in which a group's own heartbeat can name the rank that hangs.
MIN_GRACE_S = 10.0
# A rollout group is started again by itself: all that it has is a version of weights, in files.
_LOST_WITH_STATE = frozenset(ROLES) - {"rollout"}


@dataclass(frozen=True)
class Workers:
    """The gRPC clients of all worker groups of a run. There is no critic if the advantages need no values.

    Attributes:
        trained: the clients of groups that train and save a model, actor first.
        clients: the clients of all groups, actor first.
        rollout: the client of the group that samples in the actor's place; None if the actor's group alone samples.
        reference: the client of the group that hosts the reference model; None if KL is not used.
        reward_model: the client of the group that hosts the reward model; None if there is no reward model.
        teacher: the client of the group that hosts the teachers; None if there is no teacher.
    """

    actor: ActorClient
    critic: CriticClient | None
    trained: Sequence[ActorClient | CriticClient]
    clients: Sequence[WorkerClient]
    rollout: RolloutClient | None
    reference: WorkerClient | None
    reward_model: WorkerClient | None
    teacher: WorkerClient | None

    @classmethod
    def of(
        cls,
        config: Config,
        actor: ActorClient,
        critic: CriticClient | None,
        reward: RewardClient | None = None,
        rollout: RolloutClient | None = None,
    ) -> Self:
        """Makes a `Workers` of the clients; looks up in the configuration which groups host the frozen models."""
        hosts: dict[RoleName | None, WorkerClient | None] = {"actor": actor, "critic": critic, "reward": reward}
        trained = [client for client in (actor, critic) if client is not None]
        clients = [client for client in (*hosts.values(), rollout) if client is not None]
        frozen = (hosts.get(host) for host in (config.reference_host, config.reward_model_host, config.teacher_host))
        return cls(actor, critic, trained, clients, rollout, *frozen)


class WorkerGroups:
    """Owns the gRPC channels to all worker groups and, if `services.launch` is local, the groups' processes.

    `config` is resolved by the run folder; the ranks read it from `config_file`.
    """

    def __init__(
        self,
        config: Config,
        config_file: Path,
        caller: Caller,
        on_progress: ProgressCallback,
    ) -> None:
        """Prepares calls and processes of the groups; starts none of them.

        Tokens leave the environment of this process afterwards, because scoring processes inherit it.
        """
        self._config = config
        self._caller = caller
        self._on_progress = on_progress
        services = config.services
        self._limits = Limits(
            services.progress_timeout_s,
            services.reconnect_timeout_s,
            max_batch_bytes=services.max_batch_bytes,
            grace_s=max(MIN_GRACE_S, services.progress_timeout_s / 10),
        )
        self._credentials = load_credentials(services.security, "controller")
        self._launcher: LocalLauncher | None = None
        if services.launch == "local":
            self._launcher = LocalLauncher(config, config_file, tokens=self._credentials.tokens)
            self._credentials = replace(self._credentials, tokens=self._launcher.tokens)
        # Scoring processes, which run users' code, inherit this process's environment.
        for variable in filter(None, (services.security.token_env, RUN_TOKEN_VARIABLE)):
            os.environ.pop(variable, None)
        self._workers: Workers | None = None
        self._was_connected = False

    @property
    def clients(self) -> Sequence[WorkerClient]:
        """The gRPC clients of the connected worker groups, actor first."""
        return [] if self._workers is None else self._workers.clients

    @property
    def trained(self) -> Sequence[WorkerClient]:
        """The gRPC clients of the connected worker groups that train a model, actor first."""
        return [] if self._workers is None else self._workers.trained

    async def launch(self) -> None:
        """Starts the processes of all groups that are started here, which load their models until `connect`."""
        if self._launcher is not None:
            self._launcher.launch()

    async def connect(self) -> Workers:
        """Starts the groups that do not run, and makes a handshake with every group; returns the clients.

        Raises:
            GroupFailed: a group that was started here did not come up.
            ConfigError: a configured worker cannot be reached, has another role, config or version, or belongs to a
                newer controller.
            WireError: a worker that was connected before is lost.
        """
        if self._launcher is None:
            addresses = configured_addresses(self._config)
        else:
            addresses = {role: endpoint.address for role, endpoint in (await self._launcher.start()).items()}
        await self._close_channels()
        self._caller = replace(self._caller, connection=self._caller.connection + 1)

        def client(kind: type[Client]) -> Client | None:
            if (role := kind.role) not in addresses:
                return None
            caller = replace(self._caller, config_digest=worker_digest(self._config, role))
            return kind(addresses[role], caller, self._limits, self._on_progress, self._credentials)

        actor = client(ActorClient)
        assert actor is not None, "every run has an actor"
        self._workers = Workers.of(
            self._config, actor, client(CriticClient), client(RewardClient), client(RolloutClient)
        )
        # A group may have ended while another group started.
        await run_watched(self._greet(), self.watch(ROLES))
        return self._workers

    async def _greet(self) -> None:
        """Shakes hands with all groups, at the same time.

        Raises:
            ConfigError: a group refuses this controller, or external groups do not answer at the start of a run.
            Unavailable: a group does not answer that was started here, or that has answered before: it is lost.
        """
        try:
            await gather_calls(*(client.handshake(self._config.services.start_timeout_s) for client in self.clients))
        except (WrongState, AccessDenied, Unavailable) as error:
            if isinstance(error, Unavailable) and (self._launcher is not None or self._was_connected):
                raise
            more = "; python -m controller doctor --config FILE says more" if isinstance(error, Unavailable) else ""
            raise ConfigError(f"{error}{more}") from error
        self._was_connected = True
        self._log_trained()

    def _log_trained(self) -> None:
        """Logs, for each role that trains adapters or a part of its weights, how many parameters learn."""
        for client in self.trained:
            role = client.role
            trained = client.worker.num_trainable_parameters
            total = client.worker.num_parameters
            if not 0 < trained != total:
                continue
            model = self._config.critic if role == "critic" else self._config.actor
            if model.lora_rank:
                log.info(
                    "%s: adapters with %s trained parameters beside a model of %s", role, f"{trained:,}", f"{total:,}"
                )
            else:
                log.info(
                    "%s: %s of %s parameters learn, %s holds the others",
                    role,
                    f"{trained:,}",
                    f"{total:,}",
                    f"{role}.{'freeze' if model.freeze else 'freeze_vision_tower'}",
                )

    def can_recover(self, error: Exception, roles: Collection[str] = _LOST_WITH_STATE) -> bool:
        """Returns True if the run can go on after this error, which may come from the loss of one of these groups.

        After the loss of a rollout group it goes on as it is, else from the last checkpoint that all roles have.
        """
        return ends_by_restart(error, was_connected=self._was_connected, has_lost_group=bool(self._gone(roles)))

    def _gone(self, roles: Collection[str] = ROLES) -> dict[RoleName, LocalGroup]:
        """Returns the groups of `roles` that were started here and of which at least one process has ended."""
        groups = self._launcher.groups if self._launcher else {}
        return {role: group for role, group in groups.items() if role in roles and group.is_gone}

    async def oom_kill(self) -> str | None:
        """Returns a message that names a rank that the kernel killed because memory ran out; None without one."""
        groups = self._launcher.groups.values() if self._launcher else ()
        return next(filter(None, await asyncio.gather(*(group.oom_kill() for group in groups))), None)

    async def end_reason(self, error: Exception) -> str | None:
        """Returns why the group of `error` has ended; None if nobody knows, or if `error` says so.

        A group that ends while no call is open answers nobody, and `error` only says that the group is gone. Then the
        group has written down its reason. If it could not, torchrun knows how its rank has ended.
        """
        if reason := self._written_reason(error):
            return None if reason in str(error) else reason
        if self._launcher is None or not isinstance(error, Unavailable):
            return None
        group = next((group for role, group in self._launcher.groups.items() if role == error.place.role), None)
        return await group.how_it_ended() if group else None

    def _written_reason(self, error: Exception) -> str | None:
        for client in self.clients:
            if isinstance(error, RECOVERABLE) and client.role == error.place.role:
                return read_end_reason(self._config.run.dir, client.role, client.worker.instance_id)
        return None

    async def watch(self, roles: Collection[str] = _LOST_WITH_STATE) -> NoReturn:
        """Polls the groups until one has ended, then raises, so that a loss is noticed between calls; never returns.

        The loss of a rollout group counts only for who waits for it, and asks for this role.

        Raises:
            Unavailable: a group that was started here has ended, or one of its ranks has.
        """
        while True:
            for role, group in self._gone(roles).items():
                lost = await group.lost_rank()
                await group.rank_0_ended()
                raise Unavailable("the group has ended", Place(role=role, rank=lost))
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def discard_lost(self, error: Exception) -> None:
        """Ends the remaining processes of lost groups that were started here, so that `connect` starts them again.

        A group is lost if `error` names it, if it or one of its ranks has ended, or if it does not answer. The other
        groups keep running, with their models loaded.
        """
        if self._launcher is None:
            await self._close_channels()
            return
        lost: set[str] = set(self._gone())
        if isinstance(error, LOST_GROUP):
            lost.add(error.place.role)
        elif isinstance(error, GroupFailed):
            lost.add(error.role)
        others = [client for client in self.clients if client.role not in lost]
        answers = await asyncio.gather(*(client.get_status() for client in others), return_exceptions=True)
        lost |= {client.role for client, answer in zip(others, answers, strict=True) if isinstance(answer, Exception)}
        await self._close_channels()
        await self._launcher.discard(lost)

    async def reopen(self, role: RoleName) -> None:
        """Ends what is left of one group, starts the group again if it was started here, and makes a new handshake.

        The other groups go on, over their connections.

        Raises:
            GroupFailed, WireError: the group does not come up.
        """
        [client] = [client for client in self.clients if client.role == role]
        address = client.address
        if self._launcher is not None:
            await self._launcher.discard((role,))
            address = (await self._launcher.groups[role].start()).address
        self._caller = replace(self._caller, connection=self._caller.connection + 1)
        await client.reopen(address, self._caller.connection)
        await run_watched(client.handshake(self._config.services.start_timeout_s), self.watch((role,)))

    async def restore(self, step: int, manifests: Mapping[str, Manifest]) -> list[Span]:
        """Makes every trained role load the checkpoint of `step`, at the same time; step 0 is the initial model.

        Returns:
            The spans of the loads. A role that is still at its initial model does not load it again.

        Raises:
            DamagedCheckpoint: a part is not as it was written, or gives other weights than were saved.
            ConfigError: the checkpoint does not fit the model, or lacks a role.
            WireError: a worker is lost.
        """
        stale = {client.role: client for client in self.trained if not client.is_fresh_at(step)}
        if step and (missing := stale.keys() - manifests.keys()):
            raise ConfigError(
                f"the checkpoint of step {step} holds {' and '.join(sorted(manifests))}, expected also the"
                f" {' and the '.join(sorted(missing))} of this run"
            )
        try:
            replies = dict(zip(stale, await _load(stale.values(), step), strict=True))
        except DataLoss as error:
            raise DamagedCheckpoint(str(error)) from error
        except (InvalidArgument, NotFound) as error:
            raise ConfigError(f"the checkpoint of step {step} cannot be loaded: {error}") from error
        for role, reply in replies.items():
            if step and (loaded := reply.result.weights_sha256) != (expected := manifests[role].weights_sha256):
                raise DamagedCheckpoint(
                    f"{role}: expected weights with sha256 {expected[:16]}..., found {loaded[:16]}... after loading"
                )
        return [reply.span(role, "load_checkpoint", step) for role, reply in replies.items()]

    async def weights_digests(self) -> dict[str, str]:
        """Asks every trained role for the sha256 of its weights; returns the digests by role."""
        digests = await gather_calls(*(client.compute_weights_digest() for client in self.trained))
        return {client.role: digest for client, digest in zip(self.trained, digests, strict=True)}

    async def close(self) -> None:
        """Closes the gRPC channels and ends the groups that were started here."""
        await self._close_channels()
        if self._launcher:
            await self._launcher.stop()

    def kill(self) -> None:
        """Kills the worker groups that were started here, without waiting for their end."""
        if self._launcher:
            self._launcher.kill()

    async def _close_channels(self) -> None:
        await asyncio.gather(*(client.close() for client in self.clients))
        self._workers = None


def configured_addresses(config: Config) -> dict[RoleName, str]:
    """Returns the addresses of worker groups that are started elsewhere, by role; ConfigError if one is missing."""
    addresses = {role: config.services.of(role).address for role in config.roles}
    for role, address in addresses.items():
        if not address:
            raise ConfigError(f"services.{role}.address: expected host:port, because services.launch is external")
    return addresses


async def _load(clients: Iterable[WorkerClient], step: int) -> list[CommandReply]:
    """Makes all worker groups load the checkpoint at the same time; waits for all loads, also if one of them fails.

    The caller may move the files after an error, so that no load may still run. The loss of a group is raised before a
    damaged file: the group that comes back reads the file again.
    """
    loads = [asyncio.create_task(client.load_checkpoint(step)) for client in clients]
    errors = [error for error in await asyncio.gather(*loads, return_exceptions=True) if isinstance(error, Exception)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, DataLoss))
    return [load.result() for load in loads]
