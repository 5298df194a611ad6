"""Starts the worker groups on this machine (`services.launch: local`), and ends them when the controller exits."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from secrets import token_urlsafe

from controller.workers.concurrency import gather_calls
from controller.workers.local_group import LocalGroup
from controller.workers.template import TEMPLATE, Template
from splitppo.config import Config
from splitppo.config.section import RoleName
from splitppo.rpc.bearer_tokens import RUN_TOKEN_VARIABLE, BearerTokens
from splitppo.rpc.secret_files import write_secret
from splitppo.run_folder.logs import LOGS, log_of_template
from splitppo.run_folder.processes import Group

log = logging.getLogger(__name__)


class LocalLauncher:
    """Starts and ends all worker groups of a run on this machine. The arguments are those of `LocalGroup`.

    Groups with the same number of threads, which libraries read when they are loaded, are forked from one template, by
    default that of `python -m services.runtime.group.template`.

    Attributes:
        tokens: the bearer tokens that the groups demand of callers: the argument `tokens`, or a token made for this
            run. As long as the groups run, the made token is in services/token in the run folder, readable by its owner
            alone.
    """

    def __init__(
        self,
        config: Config,
        config_file: Path,
        template: Sequence[str] = TEMPLATE,
        *,
        tokens: BearerTokens | None = None,
    ) -> None:
        """Makes a template for each number of threads, and a group for each role; starts none of them.

        Groups that share GPUs and measure the free memory start last. The token goes to the groups in a variable of the
        environment, unless they read it from `services.security.token_file`.
        """
        security = config.services.security
        self.tokens = tokens or BearerTokens((token_urlsafe(32),))
        self._token_file = None if tokens else config.run.dir / "services" / "token"
        variable = security.token_env or RUN_TOKEN_VARIABLE
        secrets = {} if security.token_file else {variable: "\n".join(self.tokens.accepted)}
        self._templates: list[Template] = []
        self.groups: dict[RoleName, LocalGroup] = {}
        for num_threads, roles in _roles_by_threads(config).items():
            log_file = config.run.dir / LOGS / log_of_template(roles)
            forked_from = Template([*template, "--config", str(config_file), *roles], num_threads, log_file)
            self._templates.append(forked_from)
            self.groups |= {role: LocalGroup(role, config, config_file, forked_from, secrets) for role in roles}
        self._last = config.roles_that_measure_shared_gpus
        self._first = [role for role in self.groups if role not in self._last]
        if config.shared_devices:
            log.warning("several groups use the GPUs %s: they share memory and compute", list(config.shared_devices))

    def launch(self) -> None:
        """Starts the processes of the groups that do not run; does not wait until they take calls.

        Groups that measure the memory of a GPU that another group uses are left to `start`.
        """
        if self._token_file is not None:
            write_secret(self._token_file, self.tokens.accepted[0])
        for template in self._templates:
            template.start()
        for role in self._first:
            self.groups[role].launch()

    async def start(self) -> dict[RoleName, Group]:
        """Starts every group that does not run, waits until all groups take calls; returns the endpoints by role.

        Groups that measure the memory of a GPU that another group uses are started when all others take calls.
        """
        self.launch()
        endpoints: dict[RoleName, Group] = {}
        for roles in (self._first, self._last):
            started = await gather_calls(*(self.groups[role].start() for role in roles))
            endpoints |= zip(roles, started, strict=True)
        return {role: endpoints[role] for role in self.groups}

    async def discard(self, roles: Iterable[str]) -> None:
        """Kills the remaining processes of the lost groups of these roles; the next `start` starts them again."""
        await asyncio.gather(*(group.discard() for role, group in self.groups.items() if role in roles))

    async def stop(self) -> None:
        """Ends every worker group (SIGTERM first, SIGKILL last), and removes the token file."""
        await asyncio.gather(*(group.stop() for group in self.groups.values()))
        self._end_templates()
        self._remove_token_file()

    def kill(self) -> None:
        """Kills every worker group at once by SIGKILL, and removes the token file."""
        for group in self.groups.values():
            group.kill()
        self._end_templates()
        self._remove_token_file()

    def _end_templates(self) -> None:
        for template in self._templates:
            template.end()

    def _remove_token_file(self) -> None:
        if self._token_file is not None:
            with contextlib.suppress(OSError):  # without groups the token is of no use
                self._token_file.unlink(missing_ok=True)


def _roles_by_threads(config: Config) -> dict[int, list[RoleName]]:
    """Returns which groups have the same number of threads in each rank, by this number."""
    roles: dict[int, list[RoleName]] = {}
    for role in config.roles:
        num_threads = config.services.of(role).threads
        assert num_threads != "auto", "the run folder resolves it"
        roles.setdefault(num_threads, []).append(role)
    return roles
