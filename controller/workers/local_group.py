"""One worker group on this machine: it is started, watched and ended, and it says how it has ended.

A group is a torchrun process with its own session, CPU/GPU set and thread count. It is forked from a template, a
process that has imported everything already (template.py). The group's standard input is a pipe to which only the
controller writes. Torchrun passes the pipe on to every rank, and a rank exits when the pipe has ended. Therefore the
groups end even if the controller is killed.
"""

import asyncio
import logging
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from controller.workers.template import Template, TemplateFailed, Torchrun, last_lines, read_log
from splitppo.config import Config
from splitppo.config.compiled import compile_keys
from splitppo.config.section import RoleName
from splitppo.machine.children.ending import exit_code_of, has_ended_within, how_it_ended
from splitppo.machine.children.forks import UNKNOWN
from splitppo.machine.children.tree import find_processes, is_running, kill_trees, wait_gone
from splitppo.machine.gpus import VISIBLE_DEVICES, visible_devices
from splitppo.machine.host_memory import num_oom_kills
from splitppo.run_folder.end_reason import BAD_INPUT_EXIT, FirstEnd, first_end_file, read_first_end
from splitppo.run_folder.logs import LOGS, log_before, log_of_rank, log_of_torchrun
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


class GroupFiles:
    """The files in the run folder by which a group says where it is and how it has ended.

    Attributes:
        torchrun_log: what its torchrun prints.
        first_end: which of its ranks ended first, and how; torchrun writes it.
    """

    def __init__(self, run_dir: Path, role: RoleName) -> None:
        self._run_dir = run_dir
        self._role = role
        self._logs = run_dir / LOGS
        self.torchrun_log = self._logs / log_of_torchrun(role)
        self.first_end = first_end_file(run_dir, role)

    def begin(self) -> None:
        """Removes what an earlier start has said, and puts the logs of its ranks aside."""
        for file in (announcement(self._run_dir, self._role), self.first_end):
            file.unlink(missing_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        for old_log in self._logs.glob(f"{self._role}_[0-9]*.log"):
            old_log.replace(old_log.with_name(log_before(old_log.name)))

    def announced(self) -> Group | None:
        """Returns where the group takes calls; None before, and after its end."""
        return Group.announced(self._run_dir, self._role)

    def log_of(self, rank: int) -> Path:
        """Returns the log of a rank; that of torchrun if the rank has logged nothing."""
        of_rank = self._logs / log_of_rank(self._role, rank)
        return of_rank if read_log(of_rank).strip() else self.torchrun_log


class GroupStart:
    """One start of a group: its torchrun, and the ranks that torchrun starts.

    Attributes:
        torchrun: the process, which the template was asked for.
        group: where it takes calls; None before it does.
    """

    def __init__(self, torchrun: Torchrun, files: GroupFiles, num_earlier_oom_kills: int) -> None:
        self.torchrun = torchrun
        self.group: Group | None = None
        self._files = files
        self._num_earlier_oom_kills = num_earlier_oom_kills
        self._ranks: list[psutil.Process] = []

    def came_up(self, group: Group) -> None:
        """Notes where the group takes calls, and its ranks, which are alive."""
        self.group = group
        self._ranks = find_processes(process.pid for process in group.processes)

    @property
    def has_ended(self) -> bool:
        """True if torchrun has exited."""
        return self.torchrun.process.poll() is not None

    @property
    def is_gone(self) -> bool:
        """True if the group cannot answer any more: torchrun or one of the announced ranks has ended."""
        return self.has_ended or len(self._living_ranks()) < len(self._announced_ranks())

    def _announced_ranks(self) -> Sequence[Rank]:
        return self.group.processes if self.group else ()

    def _living_ranks(self) -> list[psutil.Process]:
        return [rank for rank in self._ranks if is_running(rank)]

    async def ended_within(self, limit_s: float) -> bool:
        """Waits up to `limit_s` seconds for the end of torchrun; returns True if it has ended."""
        return await has_ended_within(self.torchrun.process, limit_s)

    async def lost_rank(self) -> int | None:
        """Returns the rank that ended first.

        None if torchrun itself was the first, or if several ranks have ended, and torchrun does not soon say which one
        was.
        """
        living = {rank.pid for rank in self._living_ranks()}
        ended = [process.rank for process in self._announced_ranks() if process.pid not in living]
        if len(ended) == 1 and not self.has_ended:
            return ended[0]
        await self.ended_within(LOST_RANK_TIMEOUT_S)
        first = self.first_end()
        return first.rank if first else None

    async def rank_0_ended(self) -> None:
        """Waits until rank 0 has ended, at most ANSWER_LIMIT_S: until then it may answer why the group ends."""
        rank_0 = {process.pid for process in self._announced_ranks() if process.rank == 0}
        await wait_gone([rank for rank in self._living_ranks() if rank.pid in rank_0], ANSWER_LIMIT_S)

    def first_end(self) -> FirstEnd | None:
        """Returns which rank ended first, and how, as torchrun has written it; None before."""
        return read_first_end(self._files.first_end)

    async def oom_kill(self) -> str | None:
        """Returns which rank the kernel has killed because memory ran out, and how; None without one."""
        if num_oom_kills() == self._num_earlier_oom_kills or not self.is_gone:
            return None
        await self.ended_within(CULPRIT_TIMEOUT_S)
        first = self.first_end()
        return str(first) if first and first.is_oom_kill else None

    def exit_code(self) -> int | None:
        """Returns the exit code of the rank that ended first, else of torchrun; None if both are not known."""
        first = self.first_end()
        return first.exit_code if first else self.torchrun.process.poll()

    async def stop(self, role: RoleName) -> None:
        """Asks all processes to end, by SIGTERM and then by the end of their standard input."""
        self.torchrun.process.send_signal(signal.SIGTERM)
        await self.ended_within(STOP_GRACE_S)
        self.torchrun.cut_lifeline()
        if not await self.ended_within(LIFELINE_TIMEOUT_S):
            log.warning("the %s group did not end in time: SIGKILL", role)

    async def end(self, role: RoleName) -> None:
        """Ends all processes by SIGKILL, and waits until they are gone."""
        victims = self.kill()
        if not await self.ended_within(KILL_TIMEOUT_S):
            log.error("torchrun (pid %s) of the %s group cannot be ended", self.torchrun.process.pid, role)
        elif left := await wait_gone(victims, KILL_TIMEOUT_S):
            log.error("processes %s of the %s group cannot be ended", [process.pid for process in left], role)

    def kill(self) -> list[psutil.Process]:
        """Sends SIGKILL to torchrun and to ranks that still run, without waiting; returns these processes."""
        pid = self.torchrun.process.pid
        is_running_yet = pid > 0 and not self.has_ended
        return kill_trees(find_processes([pid] if is_running_yet else []), self._living_ranks())


class LocalGroup:
    """One worker group on this machine, which can be started again after its end.

    Args:
        config, config_file: the resolved configuration of the run, and its file, which the ranks read.
        template: torchrun is forked from it.
        secrets: environment variables for the ranks alone.
    """

    def __init__(
        self, role: RoleName, config: Config, config_file: Path, template: Template, secrets: Mapping[str, str]
    ) -> None:
        self.role: RoleName = role
        self._service = config.services.of(role)
        self._compile_keys = compile_keys(config, role)
        self._start_timeout_s = config.services.start_timeout_s
        self._files = GroupFiles(config.run.dir, role)
        self._template = template
        self._arguments = (
            *("--nproc-per-node", str(self._service.num_processes)),
            *("-m", f"services.{role}", "--config", str(config_file), "--lifeline"),
        )
        self._secrets = secrets
        self._start: GroupStart | None = None

    @property
    def endpoint(self) -> Group | None:
        """Where the group takes calls; None before it does."""
        return self._start.group if self._start else None

    @property
    def has_ended(self) -> bool:
        """True if the group's torchrun process has exited, or was never started."""
        return self._start is None or self._start.has_ended

    @property
    def is_gone(self) -> bool:
        """True if the worker group cannot answer: torchrun or a rank has ended, or it was never started."""
        return self._start is None or self._start.is_gone

    def launch(self) -> None:
        """Starts the group's processes unless they were started; does not wait until they take calls.

        A start that has failed is left for `start` to tell.

        Raises:
            ConfigError: `services.*.devices` has a number outside of the GPUs that this process may use.
        """
        has_come_up = self.endpoint is not None
        if self._start is None or (has_come_up and self.has_ended):
            self._start = self._new_start()

    async def start(self) -> Group:
        """Starts the group unless it runs (`launch`), and waits until its rank 0 takes calls; GroupFailed if not."""
        self.launch()
        if self.endpoint is None:
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    start = await self._forked()
                    start.came_up(await self._announced(start))
            except TimeoutError as error:
                raise self._late() from error
        assert self.endpoint is not None, "it has come up"
        return self.endpoint

    def _new_start(self) -> GroupStart:
        """Asks the template for a torchrun of this group."""
        num_earlier_oom_kills = num_oom_kills()
        self._files.begin()
        request = {
            "arguments": self._arguments,
            "environment": {
                VISIBLE_DEVICES: visible_devices(f"services.{self.role}.devices", self._service.devices),
                **self._secrets,
            },
            "report_file": str(self._files.first_end),
        }
        torchrun = self._template.fork(request, self._files.torchrun_log)
        return GroupStart(torchrun, self._files, num_earlier_oom_kills)

    async def _forked(self) -> GroupStart:
        """Waits until the template has forked torchrun; asks another template if that one was killed, or hangs."""
        for _ in range(MAX_TEMPLATES):
            start = self._start
            assert start is not None, "it was launched"
            try:
                if await start.torchrun.started():
                    break
            except TemplateFailed as error:
                raise GroupFailed(f"the {self.role} group ended at start; {error}", role=self.role) from error
            start.torchrun.cut_lifeline()
            self._start = self._new_start()
        else:
            raise GroupFailed(f"the {self.role} group ended at start: its templates were killed", role=self.role)
        log.info("started the %s group, torchrun pid %d", self.role, start.torchrun.process.pid)
        if self._compile_keys:
            keys = ", ".join(self._compile_keys)
            log.info("the %s group compiles layers (%s): a minute or more, less from a cache", self.role, keys)
        return start

    async def _announced(self, start: GroupStart) -> Group:
        """Waits until the started group has written down its address; GroupFailed if it ends before."""
        while (group := self._files.announced()) is None:  # a group that ends removes the file
            if start.has_ended:
                raise self._failure(start, "ended at start")
            await asyncio.sleep(POLL_INTERVAL_S)
        return group

    def _late(self) -> GroupFailed:
        """Makes the error of a group that did not come up in time."""
        what = f"did not come up in {self._start_timeout_s:g} s"
        start = self._start
        assert start is not None, "it was launched"
        if start.torchrun.process.pid:
            return self._failure(start, what)
        self._template.end()  # it hangs, or is stopped: the next start has another one
        why = f"its template has not forked it; {start.torchrun.said_of_template}"
        return GroupFailed(f"the {self.role} group {what}: {why}", role=self.role)

    def _failure(self, start: GroupStart, what: str) -> GroupFailed:
        """Makes the error of a failed group: the sentence of a rank that refused its input, else its last log lines."""
        first = start.first_end()
        exit_code = start.exit_code()
        is_bad_input = exit_code == BAD_INPUT_EXIT
        if first is not None and is_bad_input and first.refusal:
            return GroupFailed(f"{self.role}: {first.refusal}", role=self.role, is_bad_input=True)
        how = f" ({first})" if first else ""
        said = last_lines(self._files.log_of(first.rank if first else 0))
        was_killed = exit_code is not None and exit_code_of(exit_code) < 0
        message = f"the {self.role} group {what}{how}; {said}"
        return GroupFailed(message, role=self.role, is_bad_input=is_bad_input, was_killed=was_killed)

    async def lost_rank(self) -> int | None:
        """Returns the rank of a lost group that ended first; None if nobody knows, or if torchrun was the first."""
        return await self._start.lost_rank() if self._start else None

    async def rank_0_ended(self) -> None:
        """Waits a moment until rank 0 of a lost group has ended: until then it may answer why the group ends."""
        if self._start is not None:
            await self._start.rank_0_ended()

    async def oom_kill(self) -> str | None:
        """Returns torchrun's message about a rank that the kernel killed because memory ran out; None without one."""
        killed = await self._start.oom_kill() if self._start else None
        return f"{self.role} {killed}" if killed else None

    async def how_it_ended(self) -> str | None:
        """Returns how the rank that ended first, or torchrun itself, has ended.

        None if the group is not lost, or if torchrun does not soon say it.
        """
        start = self._start
        if start is None or not start.is_gone or not await start.ended_within(ANSWER_LIMIT_S):
            return None
        if first := start.first_end():
            return f"{self.role} {first}"
        exit_code = start.torchrun.process.returncode
        if exit_code is None or exit_code == UNKNOWN:
            return None
        return f"the torchrun of the {self.role} {how_it_ended(exit_code_of(exit_code))}"

    async def stop(self) -> None:
        """Ends the group's processes: first by SIGTERM, then by closing their standard input, then by SIGKILL."""
        if self._start is not None and self._start.torchrun.process.pid:
            await self._start.stop(self.role)
        # Also if torchrun has ended: a stopped rank outlives torchrun.
        await self.discard()

    async def discard(self) -> None:
        """Ends the remaining processes of a lost group by SIGKILL, because they have nothing to save and may hang."""
        if self._start is None:
            return
        self._start.torchrun.cut_lifeline()
        if self._start.torchrun.process.pid:  # else it ends at once, if it is forked yet
            await self._start.end(self.role)
        self._start = None

    def kill(self) -> None:
        """Sends SIGKILL to the group's torchrun and ranks that still run, without waiting."""
        if self._start is not None:
            self._start.kill()
