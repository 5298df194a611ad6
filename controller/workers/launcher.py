"""Starts the worker groups on this machine (`services.launch: local`), and ends them when the controller exits.

Each group is a torchrun process with its own session, CPU/GPU set and thread count. The group's standard input is a
pipe to which only the controller writes. Torchrun passes the pipe on to every rank, and a rank exits when the pipe has
ended. Therefore the groups end even if the controller is killed.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

import psutil

from controller.workers.concurrency import gather_calls
from splitppo.config import Config
from splitppo.config.section import RoleName
from splitppo.end_reason import BAD_INPUT_EXIT
from splitppo.machine.gpus import VISIBLE_DEVICES, visible_devices
from splitppo.machine.host_memory import num_oom_kills
from splitppo.machine.process_tree import find_processes, is_running, kill, kill_tree, wait_gone
from splitppo.rpc.bearer_tokens import RUN_TOKEN_VARIABLE, BearerTokens
from splitppo.rpc.secret_files import write_secret

log = logging.getLogger(__name__)

STOP_GRACE_S = 30.0
LIFELINE_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 30.0  # a process inside a GPU driver may need long to end
CULPRIT_TIMEOUT_S = 15.0  # torchrun names the rank that failed first after the other ranks have ended
LOST_RANK_TIMEOUT_S = 1.0
POLL_INTERVAL_S = 0.05
TAIL_LINES = 20
TORCHRUN = (sys.executable, "-m", "services.runtime.group.torchrun")

# The line of services/runtime/group/closed_group.py that names the first rank that failed.
_CULPRIT = re.compile(
    r"^error: (rank (\d+) (?:ended with exit code \d+|was ended by \w+(, by the kernel .+)?))$", re.MULTILINE
)
_ENDED_BY_SIGNAL = 128  # a larger exit code means that a signal has ended the rank
_BAD_INPUT = re.compile(r"^error: (.*)$", re.MULTILINE)


class GroupFailed(Exception):
    """A worker group has ended, or did not start in time; the message names the rank and has the last lines of its log.

    Attributes:
        role: the role of the group.
        is_bad_input: True if the rank refused its input (a config key, a model folder).
        was_killed: True if a signal has ended the rank.
    """

    def __init__(self, message: str, *, role: str = "", is_bad_input: bool = False, was_killed: bool = False) -> None:
        super().__init__(message)
        self.role, self.is_bad_input, self.was_killed = role, is_bad_input, was_killed


@dataclass(frozen=True)
class Endpoint:
    """The address and the processes of a started worker group, as its rank 0 has announced them in a file."""

    role: RoleName
    address: str
    instance_id: str
    processes: Sequence[dict[str, Any]]


class LocalGroup:
    """One worker group on this machine: a torchrun process, and the ranks that torchrun starts.

    Args:
        config, config_file: the resolved configuration of the run, and its file, which the ranks read.
        torchrun: the command that starts torchrun.
        secrets: environment variables for the ranks alone.
    """

    def __init__(
        self, role: RoleName, config: Config, config_file: Path, torchrun: Sequence[str], secrets: Mapping[str, str]
    ) -> None:
        self.role: RoleName = role
        self.endpoint: Endpoint | None = None
        self._service = config.services.of(role)
        self._start_timeout_s = config.services.start_timeout_s
        self._announcement = config.run.dir / "services" / f"{role}.json"
        self._logs = config.run.dir / "logs"
        self._torchrun_log = self._logs / f"{role}_torchrun.log"
        self._command = (
            *torchrun,
            *("--nproc-per-node", str(self._service.num_processes)),
            *("-m", f"services.{role}", "--config", str(config_file), "--lifeline"),
        )
        self._secrets = secrets
        self._process: asyncio.subprocess.Process | None = None
        self._ranks: list[psutil.Process] = []  # the ranks that were alive when rank 0 announced the group
        self._num_oom_kills = 0  # the number on this machine before the group was started

    @property
    def has_ended(self) -> bool:
        """True if the group's torchrun process has exited, or was never started."""
        return self._process is None or self._process.returncode is not None

    @property
    def is_gone(self) -> bool:
        """True if the worker group cannot answer any more: torchrun or one of the announced ranks has ended."""
        num_ranks = len(self.endpoint.processes) if self.endpoint else 0
        return self.has_ended or len(self._living_ranks()) < num_ranks

    async def lost_rank(self) -> int | None:
        """Returns the rank that ended first; None if several have ended, and torchrun does not soon say which one."""
        living = {rank.pid for rank in self._living_ranks()}
        processes = self.endpoint.processes if self.endpoint else ()
        ended = [process["rank"] for process in processes if process["pid"] not in living]
        if len(ended) == 1:
            return int(ended[0])
        await self._ended_within(LOST_RANK_TIMEOUT_S)
        culprit = _CULPRIT.search(_read(self._torchrun_log))
        return int(culprit[2]) if culprit else None

    def _living_ranks(self) -> list[psutil.Process]:
        return [rank for rank in self._ranks if is_running(rank)]

    async def launch(self) -> None:
        """Starts the group's processes unless they run; does not wait until they take calls.

        Raises:
            ConfigError: `services.*.devices` has a number outside of the GPUs that this process may use.
        """
        if self.has_ended:
            await self._start_torchrun()

    async def start(self) -> Endpoint:
        """Starts the group unless it runs (`launch`), and waits until its rank 0 takes calls; GroupFailed if not."""
        await self.launch()
        if self.endpoint is None:
            self.endpoint = await self._announced()
            self._ranks = find_processes(process["pid"] for process in self.endpoint.processes)
        return self.endpoint

    async def _start_torchrun(self) -> None:
        self.endpoint, self._ranks, self._num_oom_kills = None, [], num_oom_kills()
        self._announcement.unlink(missing_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        for old_log in self._logs.glob(f"{self.role}_[0-9]*.log"):
            old_log.replace(old_log.with_suffix(".log.old"))
        assert self._service.threads != "auto", "the run folder resolves it"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(self._service.threads),
            VISIBLE_DEVICES: visible_devices(f"services.{self.role}.devices", self._service.devices),
            "TOKENIZERS_PARALLELISM": "false",
            **self._secrets,
        }
        # Containers often set this variable. Without bytecode every rank compiles torch and transformers at its start.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with self._torchrun_log.open("wb") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        log.info("started the %s group, torchrun pid %d", self.role, self._process.pid)

    async def _announced(self) -> Endpoint:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not (announcement := _read(self._announcement)):  # a group that ends removes the file
                    if self.has_ended:
                        raise self._failure("ended at start")
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError as error:
            raise self._failure(f"did not come up in {self._start_timeout_s:g} s") from error
        return Endpoint(**json.loads(announcement))

    def _failure(self, what: str) -> GroupFailed:
        """Makes the error of a failed group: the sentence of a rank that refused its input, else its last log lines."""
        output = _read(self._torchrun_log)
        exit_code = self._process.returncode if self._process else None
        if exit_code == BAD_INPUT_EXIT and (sentences := _BAD_INPUT.findall(output)):
            return GroupFailed(f"{self.role}: {sentences[0]}", role=self.role, is_bad_input=True)
        culprit = _CULPRIT.search(output)
        source = self._logs / f"{self.role}_{culprit[2] if culprit else 0}.log"
        text = _read(source)
        if not text.strip():
            source, text = self._torchrun_log, output
        tail = "\n".join(f"  {line}" for line in text.splitlines()[-TAIL_LINES:])
        return GroupFailed(
            f"the {self.role} group {what}{f' ({culprit[1]})' if culprit else ''}; last lines of {source}:\n{tail}",
            role=self.role,
            is_bad_input=exit_code == BAD_INPUT_EXIT,
            was_killed=exit_code is not None and (exit_code < 0 or exit_code > _ENDED_BY_SIGNAL),
        )

    async def oom_kill(self) -> str | None:
        """Returns torchrun's message about a rank that the kernel killed because memory ran out; None without one."""
        if num_oom_kills() == self._num_oom_kills or not self.is_gone:
            return None
        await self._ended_within(CULPRIT_TIMEOUT_S)
        culprit = _CULPRIT.search(_read(self._torchrun_log))
        return f"{self.role} {culprit[1]}" if culprit and culprit[3] else None

    async def stop(self) -> None:
        """Ends the group's processes: first by SIGTERM, then by closing their standard input, then by SIGKILL."""
        if self._process is None:
            return
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            await self._ended_within(STOP_GRACE_S)
        if self._process.stdin is not None:
            self._process.stdin.close()
        if not await self._ended_within(LIFELINE_TIMEOUT_S):
            log.warning("the %s group did not end in time: SIGKILL", self.role)
        # Also if torchrun has ended: a stopped rank outlives torchrun.
        await self.discard()

    async def discard(self) -> None:
        """Ends the remaining processes of a lost group by SIGKILL, because they have nothing to save and may hang."""
        victims = self.kill()
        if not await self._ended_within(KILL_TIMEOUT_S):
            pid = self._process.pid if self._process else None
            log.error("torchrun (pid %s) of the %s group cannot be ended", pid, self.role)
        elif left := await wait_gone(victims, KILL_TIMEOUT_S):
            log.error("processes %s of the %s group cannot be ended", [process.pid for process in left], self.role)
        self._process, self.endpoint, self._ranks = None, None, []

    def kill(self) -> list[psutil.Process]:
        """Sends SIGKILL to the group's torchrun and ranks that still run, without waiting; returns these processes."""
        ranks = self._living_ranks()
        return kill(ranks) if self._process is None or self.has_ended else kill_tree(self._process.pid, ranks)

    async def _ended_within(self, seconds: float) -> bool:
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), seconds)
        return self.has_ended


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class LocalLauncher:
    """Starts and ends all worker groups of a run on this machine. The arguments are those of `LocalGroup`.

    Attributes:
        tokens: the bearer tokens that the groups demand of callers: the argument `tokens`, or a token made for this
            run. As long as the groups run, the made token is in services/token in the run folder, readable by its owner
            alone.
    """

    def __init__(
        self,
        config: Config,
        config_file: Path,
        torchrun: Sequence[str] = TORCHRUN,
        *,
        tokens: BearerTokens | None = None,
    ) -> None:
        security = config.services.security
        self.tokens = tokens or BearerTokens((token_urlsafe(32),))
        self._token_file = None if tokens else config.run.dir / "services" / "token"
        variable = security.token_env or RUN_TOKEN_VARIABLE
        secrets = {} if security.token_file else {variable: "\n".join(self.tokens.accepted)}
        self.groups = {role: LocalGroup(role, config, config_file, torchrun, secrets) for role in config.roles}
        self._last = config.roles_that_measure_shared_gpus
        self._first = [role for role in self.groups if role not in self._last]
        if config.shared_devices:
            log.warning("several groups use the GPUs %s: they share memory and compute", list(config.shared_devices))

    async def launch(self) -> None:
        """Starts the processes of the groups that do not run; does not wait until they take calls.

        Groups that measure the memory of a GPU that another group uses are left to `start`.
        """
        if self._token_file is not None:
            write_secret(self._token_file, self.tokens.accepted[0])
        await gather_calls(*(self.groups[role].launch() for role in self._first))

    async def start(self) -> dict[RoleName, Endpoint]:
        """Starts every group that does not run, waits until all groups take calls; returns the endpoints by role.

        Groups that measure the memory of a GPU that another group uses are started when all others take calls.
        """
        await self.launch()
        endpoints: dict[RoleName, Endpoint] = {}
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
        self._remove_token_file()

    def kill(self) -> None:
        """Kills every worker group at once by SIGKILL, and removes the token file."""
        for group in self.groups.values():
            group.kill()
        self._remove_token_file()

    def _remove_token_file(self) -> None:
        if self._token_file is not None:
            with contextlib.suppress(OSError):  # without groups the token is of no use
                self._token_file.unlink(missing_ok=True)
