"""Ranks that torchrun forks instead of starting them: they have its imports, and differ from a start in nothing else.

What torchrun and a rank do and tell each other:

    torchrun                                             rank
    fork, before it has a thread or a port  ---------->  waits
    torch's agent starts the rank:
        environment, module, arguments  -------------->  runs the module, as `python -m MODULE` does
        poll, signals, exit code: of its own child
    reads why it ended  <------------------------------  JSON: the sentence by which it refuses its input
"""

import io
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from services.runtime.group.refusal import report_refusals_to
from splitppo.machine.children.forks import end_after
from splitppo.machine.children.parent import end_with
from splitppo.machine.children.title import set_process_title

_MAX_REFUSAL_BYTES = 1 << 16


class ForkedRank:
    """The process of a rank, forked and waiting, or running; a child of this process, with the interface of Popen."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._channel = channel
        self._pidfd = os.pidfd_open(pid)

    def start(self, arguments: Sequence[str], environment: dict[str, str], output: int, errors: int) -> None:
        """Lets the rank run `-m MODULE ARGUMENT...` in this environment, with these standard output and error."""
        with suppress(OSError):  # it has been killed, as `poll` says
            self._channel.recv(1)  # the rank is ready: it has a session of its own, by which the agent sends signals
            socket.send_fds(self._channel, [b" "], [output, errors])
            self._channel.sendall(json.dumps([arguments, environment]).encode())
            self._channel.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes what this process has open of the rank, which goes on."""
        self._channel.close()
        os.close(self._pidfd)

    def poll(self) -> int | None:
        """Returns the exit code of the rank, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the rank and returns its exit code; subprocess.TimeoutExpired after `timeout` s."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        poller.poll(None if timeout is None else timeout * 1000)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"rank with pid {self.pid}", timeout or 0)
        return code

    def refusal(self) -> str:
        """Returns the sentence by which a rank that has ended has refused its input; empty without one."""
        self._channel.setblocking(False)
        with suppress(OSError, ValueError):
            return str(json.loads(self._channel.recv(_MAX_REFUSAL_BYTES))["refusal"])
        return ""


def fork_ranks(num_ranks: int, *, with_lifeline: bool) -> list[ForkedRank]:
    """Forks the ranks of a group, which then wait until torch's agent starts them (`start_forked`).

    Call it before this process has a second thread or a port. With a lifeline the kernel kills the ranks when this
    process ends.
    """
    ranks: list[ForkedRank] = []
    parent = os.getpid()
    for _ in range(num_ranks):
        parent_end, rank_end = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            parent_end.close()
            for earlier_rank in ranks:  # the fork has a copy of all that this process has open
                earlier_rank.close()
            end_after(partial(_be_rank, rank_end, parent, with_lifeline=with_lifeline))
        rank_end.close()
        ranks.append(ForkedRank(pid, parent_end))
    return ranks


def start_forked(ranks: Sequence[ForkedRank]) -> set[int]:
    """Makes torch's agent start these ranks, by local rank, instead of processes of its own.

    Returns:
        The pids of the ranks that the agent has told to end, because another one had ended; it grows when that happens.
    """
    told_to_end: set[int] = set()

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            """Starts the forked rank of this environment; a process, as torch does, for another command line."""
            if args[:3] != (sys.executable, "-u", "-m"):  # a rank that is bound to a NUMA node is started by numactl
                return super()._popen(args, env)
            rank = ranks[int(env["LOCAL_RANK"])]
            # The files of --redirects and --tee, else the streams of this process.
            output = self._stdout.fileno() if self._stdout else 1
            errors = self._stderr.fileno() if self._stderr else 2
            rank.start(args[3:], env, output, errors)
            return rank

        def close(self, death_sig: signal.Signals | None = None) -> None:
            """Notes that the agent tells the rank to end, and tells it."""
            told_to_end.add(self.proc.pid)
            super().close(death_sig)

    vars(api)["get_subprocess_handler"] = Handler
    return told_to_end


def _be_rank(channel: socket.socket, parent: int, *, with_lifeline: bool) -> int:
    """Waits for its environment and what to run, runs it, and returns the exit code; 1 if torchrun has ended before."""
    if with_lifeline:
        end_with(parent)
    os.setsid()
    if received := _wait_for_start(channel):
        arguments, environment = json.loads(received)
        _run(arguments, environment, channel)
        return 0
    return 1


def _wait_for_start(channel: socket.socket) -> bytes:
    """Waits for the standard output and error of this rank, and returns what to run; empty if torchrun has ended.

    The byte that it sends says that the rank is ready, with a session of its own.
    """
    with suppress(ConnectionError):
        channel.send(b"r")
        _, output_and_errors, _, _ = socket.recv_fds(channel, 1, 2)
        for stream, descriptor in enumerate(output_and_errors, start=1):
            os.dup2(descriptor, stream)
            os.close(descriptor)
        return b"".join(iter(lambda: channel.recv(_MAX_REFUSAL_BYTES), b""))
    return b""


def _run(arguments: Sequence[str], environment: dict[str, str], channel: socket.socket) -> None:
    """Runs `-m MODULE ARGUMENT...` in this process; SystemExit if the module leaves by `sys.exit`."""
    module, *rest = arguments
    os.environ.clear()
    os.environ.update(environment)
    set_process_title(f"{module} rank {environment['RANK']} of {environment['WORLD_SIZE']}: {' '.join(rest)}")
    report_refusals_to(channel)
    random.seed()
    if numpy := sys.modules.get("numpy"):  # a rank that was started would have a state of its own
        numpy.random.seed()
    sys.argv = [module, *rest]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # torch starts ranks by `python -u`
    runpy.run_module(module, run_name="__main__", alter_sys=True)
