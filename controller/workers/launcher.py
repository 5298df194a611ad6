"""Starts the worker groups on this machine (`services.launch: local`), and ends them when the controller exits.

Each group is a torchrun process with its own session, CPU/GPU set and thread count. It is forked from a template, a
process that has imported everything already (template.py). The group's standard input is a pipe to which only the
controller writes. Torchrun passes the pipe on to every rank, and a rank exits when the pipe has ended. Therefore the
groups end even if the controller is killed.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from secrets import token_urlsafe

import psutil

from controller.workers.concurrency import gather_calls
from controller.workers.template import TEMPLATE, Template, TemplateFailed, Torchrun, last_lines, read_log
from splitppo.config import Config
from splitppo.config.compiled import compile_keys
from splitppo.config.section import RoleName
from splitppo.machine.children.ending import exit_code_of, has_ended_within, how_it_ended
from splitppo.machine.children.forks import UNKNOWN
from splitppo.machine.children.tree import find_processes, is_running, kill_trees, wait_gone
from splitppo.machine.gpus import VISIBLE_DEVICES, visible_devices
from splitppo.machine.host_memory import num_oom_kills
from splitppo.rpc.bearer_tokens import RUN_TOKEN_VARIABLE, BearerTokens
from splitppo.rpc.secret_files import write_secret
from splitppo.run_folder.end_reason import BAD_INPUT_EXIT, FirstEnd, read_first_end
from splitppo.run_folder.processes import Group, Rank, announcement

log = logging.getLogger(__name__)

STOP_GRACE_S = 30.0
LIFELINE_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 30.0  # a process inside a GPU driver may need long to end
CULPRIT_TIMEOUT_S = 15.0  # torchrun names the rank that failed first after the other ranks have ended
LOST_RANK_TIMEOUT_S = 1.0
ANSWER_LIMIT_S = 2.0
POLL_INTERVAL_S = 0.05
MAX_TEMPLATES = 3  # one after the other, if each is killed before it has forked the group


class GroupFailed(Exception):
    """A worker group has ended, or did not start in time; the message names the rank and has the last lines of its log.

    Attributes:
        role: the role of the group.
        is_bad_input: True if the rank refused its input (a config key, a model folder).
        was_killed: True if a signal has ended the rank.
    """

    def __init__(self, message: str, *, role: str = "", is_bad_input: bool = False, was_killed: bool = False) -> None:
        super().__init__(message)
        self.role = role
        self.is_bad_input = is_bad_input
        self.was_killed = was_killed


class LocalGroup:
    """One worker group on this machine: a torchrun process, and the ranks that torchrun starts.

    Args:
        config, config_file: the resolved configuration of the run, and its file, which the ranks read.
        template: torchrun is forked from it.
        secrets: environment variables for the ranks alone.
    """

    def __init__(
        self, role: RoleName, config: Config, config_file: Path, template: Template, secrets: Mapping[str, str]
    ) -> None:
        self.role: RoleName = role
        self.endpoint: Group | None = None
        self._service = config.services.of(role)
        self._compile_keys = compile_keys(config, role)
        self._start_timeout_s = config.services.start_timeout_s
        self._run_dir = config.run.dir
        self._logs = config.run.dir / "logs"
        self._torchrun_log = self._logs / f"{role}_torchrun.log"
        self._first_end_file = config.run.dir / "services" / f"{role}.end.json"
        self._template = template
        self._arguments = (
            *("--nproc-per-node", str(self._service.num_processes)),
            *("-m", f"services.{role}", "--config", str(config_file), "--lifeline"),
        )
        self._secrets = secrets
        self._torchrun: Torchrun | None = None
        self._ranks: list[psutil.Process] = []  # the ranks that were alive when rank 0 announced the group
        self._num_oom_kills = 0  # the number on this machine before the group was started

    @property
    def has_ended(self) -> bool:
        """True if the group's torchrun process has exited, or was never started."""
        return self._torchrun is None or self._torchrun.process.poll() is not None

    @property
    def is_gone(self) -> bool:
        """True if the worker group cannot answer any more: torchrun or one of the announced ranks has ended."""
        return self.has_ended or len(self._living_ranks()) < len(self._announced_ranks())

    async def lost_rank(self) -> int | None:
        """Returns the rank that ended first.

        None if torchrun itself was the first, or if several ranks have ended, and torchrun does not soon say which one
        was.
        """
        living = {rank.pid for rank in self._living_ranks()}
        ended = [process.rank for process in self._announced_ranks() if process.pid not in living]
        if len(ended) == 1 and not self.has_ended:
            return ended[0]
        await self._ended_within(LOST_RANK_TIMEOUT_S)
        first = self._first_end()
        return first.rank if first else None

    async def rank_0_ended(self) -> None:
        """Waits until rank 0 has ended, at most ANSWER_LIMIT_S: until then it may answer why the group ends."""
        rank_0 = {process.pid for process in self._announced_ranks() if process.rank == 0}
        await wait_gone([rank for rank in self._living_ranks() if rank.pid in rank_0], ANSWER_LIMIT_S)

    def _announced_ranks(self) -> Sequence[Rank]:
        return self.endpoint.processes if self.endpoint else ()

    def _first_end(self) -> FirstEnd | None:
        """Returns which rank of this start ended first, and how, as its torchrun has written it; None before."""
        return read_first_end(self._first_end_file)

    def _living_ranks(self) -> list[psutil.Process]:
        return [rank for rank in self._ranks if is_running(rank)]

    def launch(self) -> None:
        """Starts the group's processes unless they were started; does not wait until they take calls.

        A start that has failed is left for `start` to tell.

        Raises:
            ConfigError: `services.*.devices` has a number outside of the GPUs that this process may use.
        """
        has_come_up = self.endpoint is not None
        if self._torchrun is None or (has_come_up and self.has_ended):
            self._start_torchrun()

    async def start(self) -> Group:
        """Starts the group unless it runs (`launch`), and waits until its rank 0 takes calls; GroupFailed if not."""
        self.launch()
        if self.endpoint is None:
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    await self._forked()
                    self.endpoint = await self._announced()
            except TimeoutError as error:
                what = f"did not come up in {self._start_timeout_s:g} s"
                if self._torchrun is not None and not self._torchrun.process.pid:
                    self._template.end()  # it hangs, or is stopped: the next start has another one
                    what += f": its template has not forked it; {self._torchrun.said_of_template}"
                    raise GroupFailed(f"the {self.role} group {what}", role=self.role) from error
                raise self._failure(what) from error
            self._ranks = find_processes(process.pid for process in self.endpoint.processes)
        return self.endpoint

    def _start_torchrun(self) -> None:
        self.endpoint = None
        self._ranks = []
        self._num_oom_kills = num_oom_kills()
        for file in (announcement(self._run_dir, self.role), self._first_end_file):
            file.unlink(missing_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        for old_log in self._logs.glob(f"{self.role}_[0-9]*.log"):
            old_log.replace(old_log.with_suffix(".log.old"))
        request = {
            "arguments": self._arguments,
            "environment": {
                VISIBLE_DEVICES: visible_devices(f"services.{self.role}.devices", self._service.devices),
                **self._secrets,
            },
            "report_file": str(self._first_end_file),
        }
        self._torchrun = self._template.fork(request, self._torchrun_log)

    async def _forked(self) -> None:
        """Waits until the template has forked torchrun; asks another template if that one was killed, or hangs."""
        for _ in range(MAX_TEMPLATES):
            assert self._torchrun is not None, "it was asked for"
            try:
                if await self._torchrun.started():
                    break
            except TemplateFailed as error:
                raise GroupFailed(f"the {self.role} group ended at start; {error}", role=self.role) from error
            self._torchrun.cut_lifeline()
            self._start_torchrun()
        else:
            raise GroupFailed(f"the {self.role} group ended at start: its templates were killed", role=self.role)
        log.info("started the %s group, torchrun pid %d", self.role, self._torchrun.process.pid)
        if self._compile_keys:
            keys = ", ".join(self._compile_keys)
            log.info("the %s group compiles layers (%s): a minute or more, less from a cache", self.role, keys)

    async def _announced(self) -> Group:
        while (group := Group.announced(self._run_dir, self.role)) is None:  # a group that ends removes the file
            if self.has_ended:
                raise self._failure("ended at start")
            await asyncio.sleep(POLL_INTERVAL_S)
        return group

    def _failure(self, what: str) -> GroupFailed:
        """Makes the error of a failed group: the sentence of a rank that refused its input, else its last log lines."""
        first = self._first_end()
        exit_code = first.exit_code if first else self._torchrun.process.poll() if self._torchrun else None
        if first is not None and exit_code == BAD_INPUT_EXIT and first.refusal:
            return GroupFailed(f"{self.role}: {first.refusal}", role=self.role, is_bad_input=True)
        source = self._logs / f"{self.role}_{first.rank if first else 0}.log"
        if not read_log(source).strip():
            source = self._torchrun_log
        return GroupFailed(
            f"the {self.role} group {what}{f' ({first})' if first else ''}; {last_lines(source)}",
            role=self.role,
            is_bad_input=exit_code == BAD_INPUT_EXIT,
            was_killed=exit_code is not None and exit_code_of(exit_code) < 0,
        )

    async def oom_kill(self) -> str | None:
        """Returns torchrun's message about a rank that the kernel killed because memory ran out; None without one."""
        if num_oom_kills() == self._num_oom_kills or not self.is_gone:
            return None
        await self._ended_within(CULPRIT_TIMEOUT_S)
        first = self._first_end()
        return f"{self.role} {first}" if first and first.is_oom_kill else None

    async def how_it_ended(self) -> str | None:
        """Returns how the rank that ended first, or torchrun itself, has ended.

        None if the group is not lost, or if torchrun does not soon say it.
        """
        if self._torchrun is None or not self.is_gone or not await self._ended_within(ANSWER_LIMIT_S):
            return None
        if first := self._first_end():
            return f"{self.role} {first}"
        exit_code = self._torchrun.process.returncode
        if exit_code is None or exit_code == UNKNOWN:
            return None
        return f"the torchrun of the {self.role} {how_it_ended(exit_code_of(exit_code))}"

    async def stop(self) -> None:
        """Ends the group's processes: first by SIGTERM, then by closing their standard input, then by SIGKILL."""
        if self._torchrun is None or not self._torchrun.process.pid:
            await self.discard()
            return
        self._torchrun.process.send_signal(signal.SIGTERM)
        await self._ended_within(STOP_GRACE_S)
        self._torchrun.cut_lifeline()
        if not await self._ended_within(LIFELINE_TIMEOUT_S):
            log.warning("the %s group did not end in time: SIGKILL", self.role)
        # Also if torchrun has ended: a stopped rank outlives torchrun.
        await self.discard()

    async def discard(self) -> None:
        """Ends the remaining processes of a lost group by SIGKILL, because they have nothing to save and may hang."""
        if self._torchrun is not None:
            self._torchrun.cut_lifeline()
            if not self._torchrun.process.pid:  # if it comes, it ends at once
                self._torchrun = None
        victims = self.kill()
        if not await self._ended_within(KILL_TIMEOUT_S):
            pid = self._torchrun.process.pid if self._torchrun else None
            log.error("torchrun (pid %s) of the %s group cannot be ended", pid, self.role)
        elif left := await wait_gone(victims, KILL_TIMEOUT_S):
            log.error("processes %s of the %s group cannot be ended", [process.pid for process in left], self.role)
        self._torchrun = None
        self.endpoint = None
        self._ranks = []

    def kill(self) -> list[psutil.Process]:
        """Sends SIGKILL to the group's torchrun and ranks that still run, without waiting; returns these processes."""
        torchrun = [] if self._torchrun is None or self.has_ended else [self._torchrun.process.pid]
        return kill_trees(find_processes(filter(None, torchrun)), self._living_ranks())

    async def _ended_within(self, seconds: float) -> bool:
        return self._torchrun is None or await has_ended_within(self._torchrun.process, seconds)


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
        security = config.services.security
        self.tokens = tokens or BearerTokens((token_urlsafe(32),))
        self._token_file = None if tokens else config.run.dir / "services" / "token"
        variable = security.token_env or RUN_TOKEN_VARIABLE
        secrets = {} if security.token_file else {variable: "\n".join(self.tokens.accepted)}
        self._templates: list[Template] = []
        self.groups: dict[RoleName, LocalGroup] = {}
        threads = {role: config.services.of(role).threads for role in config.roles}
        for num_threads in dict.fromkeys(threads.values()):
            assert num_threads != "auto", "the run folder resolves it"
            roles = [role for role in config.roles if threads[role] == num_threads]
            log_file = config.run.dir / "logs" / f"{'_'.join(roles)}_template.log"
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
