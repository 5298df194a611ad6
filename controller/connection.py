"""The groups of a run as the controller sees them: started or found, greeted, restored to one step, restarted."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from controller.clients import ActorClient, Caller, CriticClient, Limits, ProgressCallback, WorkerClient
from controller.launcher import Endpoint, GroupFailed, LocalLauncher, RoleName
from controller.recovery import LOST_GROUP, ends_by_restart
from controller.run_folder import RunFolder
from controller.schedule import first_error, unless
from controller.trace import Span
from controller.trainer import Services
from splitppo.config import Config, ConfigError, SecurityConfig
from splitppo.config.digest import worker_digest
from splitppo.manifest import DamagedCheckpoint, Manifest
from splitppo.rpc.errors import (
    AccessDenied,
    DataLoss,
    InvalidArgument,
    NotFound,
    Place,
    Unavailable,
    WrongState,
)
from splitppo.rpc.security import load_credentials
from splitppo.rpc.tokens import RUN_TOKEN_VARIABLE

log = logging.getLogger(__name__)
T = TypeVar("T")

WATCH_INTERVAL_S = 0.2
# A group's own watchdog names the rank that hangs: it gets the first word.
MIN_GRACE_S = 10.0


class ServiceGroups:
    """Owns the processes (where `services.launch` is local) and the channels to them."""

    def __init__(self, config: Config, folder: RunFolder, on_progress: ProgressCallback) -> None:
        self._config = config
        self._folder = folder
        self._on_progress = on_progress
        services = config.services
        self._limits = Limits(
            services.progress_timeout_s,
            services.reconnect_timeout_s,
            max_batch_bytes=services.max_batch_bytes,
            grace_s=max(MIN_GRACE_S, services.progress_timeout_s / 10),
        )
        self._credentials = load_credentials(config.services.security, "controller")
        self._launcher: LocalLauncher | None = None
        if config.services.launch == "local":
            self._launcher = LocalLauncher(config, folder.config_file, tokens=self._credentials.tokens)
            self._credentials = replace(self._credentials, tokens=self._launcher.tokens)
        _forget_tokens(config.services.security)
        self._services: Services | None = None
        self._num_connections = 0
        self._was_connected = False

    @property
    def clients(self) -> Sequence[WorkerClient]:
        """Actor first."""
        assert self._services is not None
        services = self._services
        return [services.actor] if services.critic is None else [services.actor, services.critic]

    async def connect(self) -> Services:
        """Starts the groups that do not run, greets all, and writes processes.json.

        Raises:
            GroupFailed: a group that we started did not come up.
            ConfigError: a configured worker cannot be reached, or is not the one that was meant (other role, config,
                version, or claimed by a newer controller).
            WireError: a worker that was connected before is lost.
        """
        endpoints: dict[RoleName, Endpoint] = (
            await self._launcher.start() if self._launcher else self._configured_endpoints()
        )
        await self._close_channels()
        self._num_connections += 1
        shared = (self._limits, self._on_progress, self._credentials)
        actor = ActorClient(endpoints["actor"].address, self._caller("actor"), *shared)
        critic = None
        if "critic" in endpoints:
            critic = CriticClient(endpoints["critic"].address, self._caller("critic"), *shared)
        self._services = Services(actor, critic)
        # A group may have died while the other one started.
        await unless(self.watch(), self._greet())
        self._folder.write_processes(
            Endpoint(
                role,
                client.address,
                client.worker.instance_id,
                tuple({"rank": p.rank, "pid": p.pid, "host": p.host} for p in client.worker.processes),
            )
            for role, client in zip(endpoints, self.clients, strict=True)
        )
        return self._services

    async def _greet(self) -> None:
        try:
            await _all(client.handshake(self._config.services.start_timeout_s) for client in self.clients)
        except (WrongState, AccessDenied) as error:
            raise ConfigError(str(error)) from error
        except Unavailable as error:
            if self._launcher is not None or self._was_connected:
                raise
            raise ConfigError(str(error)) from error
        self._was_connected = True

    def _configured_endpoints(self) -> dict[RoleName, Endpoint]:
        roles: list[RoleName] = ["actor", "critic"] if self._config.uses_critic else ["actor"]
        endpoints: dict[RoleName, Endpoint] = {
            role: Endpoint(role, getattr(self._config.services, role).address) for role in roles
        }
        for role, endpoint in endpoints.items():
            if not endpoint.address:
                raise ConfigError(f"services.{role}.address: expected host:port, because services.launch is external")
        return endpoints

    def _caller(self, role: RoleName) -> Caller:
        claim = self._folder.claim
        return Caller(claim.run_id, claim.epoch, worker_digest(self._config, role), claim.nonce, self._num_connections)

    def can_recover(self, error: Exception) -> bool:
        """Whether the run can go on after this error, from the last common checkpoint."""
        return ends_by_restart(error, was_connected=self._was_connected, has_lost_group=bool(self._gone_roles()))

    def _gone_roles(self) -> set[str]:
        """Roles whose group we started, and which has ended, or one of its ranks has."""
        groups = self._launcher.groups if self._launcher else {}
        return {role for role, group in groups.items() if group.is_gone}

    async def watch(self) -> NoReturn:
        """Never returns; so that a group that ends is noticed at once, not by the next call to it.

        Raises:
            Unavailable: a group that we started has ended, or one of its ranks has.
        """
        while True:
            for role in self._gone_roles():
                raise Unavailable("the group has ended", Place(role=role))
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def recover(self, error: Exception) -> None:
        """Ends what is left of lost groups that we started, so that `connect` brings them up again.

        A group is lost if `error` says so of it, if it or one of its ranks has ended, or if it does not answer. The
        other one stays, with its models loaded.
        """
        if self._launcher is not None:
            lost = {error.place.role} if isinstance(error, LOST_GROUP) else set()
            lost |= {error.role} if isinstance(error, GroupFailed) else set()
            lost |= self._gone_roles()
            lost |= await self._silent_roles(lost)
            await self._close_channels()
            await self._launcher.discard(lost)
        else:
            await self._close_channels()

    async def _silent_roles(self, known: Set[str]) -> set[str]:
        """Other roles than the `known` ones whose group does not answer any more."""
        clients = [] if self._services is None else [client for client in self.clients if client.role not in known]
        answers = await asyncio.gather(*(client.get_status() for client in clients), return_exceptions=True)
        return {client.role for client, answer in zip(clients, answers, strict=True) if isinstance(answer, Exception)}

    async def restore(self, step: int, manifests: Mapping[str, Manifest]) -> list[Span]:
        """Brings every role to the pair checkpoint of `step`, at the same time; 0 is the initial model.

        Args:
            step: committed.
            manifests: of its parts, by role; step 0 has none.

        Returns:
            what the engines loaded when; nothing of a role that was there already.

        Raises:
            DamagedCheckpoint: a part is not as it was written, or gives other weights than were saved.
            ConfigError: the checkpoint does not fit the model, or lacks a role.
            WireError: a worker is lost.
        """
        stale = [client for client in self.clients if not client.is_fresh_at(step)]
        if step and (missing := {client.role for client in stale} - manifests.keys()):
            raise ConfigError(
                f"the checkpoint of step {step} holds {' and '.join(sorted(manifests))}, expected also the"
                f" {' and the '.join(sorted(missing))} of this run"
            )
        try:
            replies = await _all_settled(client.load_checkpoint(step) for client in stale)
        except DataLoss as error:
            raise DamagedCheckpoint(str(error)) from error
        except (InvalidArgument, NotFound) as error:
            raise ConfigError(f"the checkpoint of step {step} cannot be loaded: {error}") from error
        for client, reply in zip(stale, replies, strict=True):
            if step and reply.weights_sha256 != (expected := manifests[client.role].weights_sha256):
                raise DamagedCheckpoint(
                    f"{client.role}: expected weights with sha256 {expected[:16]}..., found"
                    f" {reply.weights_sha256[:16]}... after loading"
                )
        return [reply.span(client.role, "load_checkpoint", step) for client, reply in zip(stale, replies, strict=True)]

    async def reload_initial(self) -> None:
        """Brings every role back to its initial model, also where it never left it."""
        await _all(client.load_checkpoint(0) for client in self.clients)

    async def weights_digests(self) -> dict[str, str]:
        """sha256 of each role's weights."""
        digests = await _all(client.compute_weights_digest() for client in self.clients)
        return {client.role: digest for client, digest in zip(self.clients, digests, strict=True)}

    async def close(self) -> None:
        """Closes the channels and ends the groups that we started."""
        await self._close_channels()
        if self._launcher:
            await self._launcher.stop()

    def kill(self) -> None:
        """Ends the groups that we started at once, without waiting."""
        if self._launcher:
            self._launcher.kill()

    async def _close_channels(self) -> None:
        if self._services is not None:
            await asyncio.gather(*(client.close() for client in self.clients))
            self._services = None


def _forget_tokens(security: SecurityConfig) -> None:
    """Takes the tokens out of this process's environment: scoring processes, which run users' code, inherit it."""
    for variable in (security.token_env, RUN_TOKEN_VARIABLE):
        if variable is not None:
            os.environ.pop(variable, None)


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Awaits the same call on every group; the first failure is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        raise first_error(failures) from None
    return [task.result() for task in tasks]


async def _all_settled(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """As `_all`, but no call is left behind when another one fails: what they read may be moved away afterwards.

    A lost group outweighs a damaged file: the group that comes back looks at the file again.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    for failure in sorted(failures, key=lambda failure: isinstance(failure, DataLoss)):
        raise failure
    return [result for result in results if not isinstance(result, BaseException)]
