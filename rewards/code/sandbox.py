"""One sandbox: a Python interpreter, isolated by bubblewrap, that waits for one program, runs it and ends.

Namespaces and kernel limits confine a program. They cannot count what all its processes use together, so the process
outside measures that, and kills a program that exceeds a limit with all its processes.
"""

import itertools
import json
import os
import secrets
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Self, cast

from rewards.code.bubblewrap import ENVIRONMENT, NoSandbox, is_root, own_uid, python_command, sandbox_command
from rewards.code.cases import Cases
from rewards.code.frames import ERROR, OK, STARTED, Frames
from rewards.code.limits import TMP_BYTES, Limit, limits_of_guest, wall_s
from rewards.code.seccomp import filter_program
from rewards.code.watch import POLL_INTERVAL_S, Bounds, Watch, end_sandbox, file_system
from splitppo.config.subsections.code import CodeConfig
from splitppo.machine.children.ending import end, exit_code_within
from splitppo.machine.children.tree import kill_tree

_CHUNK_BYTES = 1 << 16
_MAX_REASON_BYTES = 1000
_EXIT_LIMIT_S = 10.0
_numbers = itertools.count()  # of the sandboxes of this process
# Prints what a program prints and raises, in its order, as an interpreter does; the traceback begins in the program.
_SCRIPT = """
import linecache, os, sys, traceback
program = {!r}
os.dup2(1, 2)
sys.stderr = sys.stdout
sys.setrecursionlimit(1000)
linecache.cache["program.py"] = len(program), None, program.splitlines(True), "program.py"
try:
    exec(compile(program, "program.py", "exec"), {{"__name__": "__main__"}})
except SystemExit as error:
    if error.code: print(f"[exit code {{error.code}}]" if isinstance(error.code, int) else error.code)
except BaseException as error:
    traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
"""


@dataclass(frozen=True)
class ProgramOutcome:
    """The result of running one program on its test cases in a sandbox.

    Attributes:
        passed: True or False for each test that was run.
        limit: the limit that the program exceeded.
        error: the reason why the sandbox gave no answer.
        is_started: True if the sandbox ended after it had begun to run the program.
    """

    passed: tuple[bool, ...] = ()
    limit: Limit | None = None
    error: str = ""
    is_started: bool = False


class Sandbox:
    """A Python interpreter in a sandbox, started at once, for one program; a context manager that ends its processes.

    The sandbox ends at the latest with the thread that started it.

    Args:
        config: the section `reward.code`; `unsafe` leaves out namespaces and the filter of system calls.

    Raises:
        NoSandbox: no sandbox can be started here.
    """

    def __init__(self, config: CodeConfig) -> None:
        """Starts the interpreter, which loads and then waits; NoSandbox for root without isolation.

        With code.unsafe it runs in a folder of its own, without bubblewrap and without a filter of system calls.
        """
        if is_root() and config.unsafe:
            raise NoSandbox("root runs code only in a sandbox, under another uid")
        self._config = config
        self._folder = tempfile.mkdtemp(prefix="splitppo-code-") if config.unsafe else None
        command = python_command()
        with os.fdopen(os.memfd_create("filter"), "wb", buffering=0) as system_calls:
            if not config.unsafe:
                system_calls.write(filter_program())
                system_calls.seek(0)
                command = sandbox_command(system_calls.fileno())
            self._process = subprocess.Popen(
                [*command, json.dumps(limits_of_guest(config, own_uid(next(_numbers))))],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=ENVIRONMENT,
                cwd=self._folder or "/",
                pass_fds=[system_calls.fileno()],
                start_new_session=True,
            )
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._stdin, self._stdout, self._stderr = (cast(IO[bytes], pipe) for pipe in pipes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all processes of the sandbox, and returns when they have ended."""
        if self._config.unsafe:
            end(self._process, kill=kill_tree)
        else:
            end_sandbox(self._process)
        for pipe in (self._stdin, self._stdout, self._stderr):
            pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def is_watched(self) -> bool:
        """True if the resources that its program uses can be measured."""
        return self._config.unsafe or file_system(self._process.pid, self._bounds()) is not None

    def run(self, program: str, cases: Cases, *, runs_all: bool = True, lifeline: int | None = None) -> ProgramOutcome:
        """Runs a program on its test cases: on all, or with `runs_all=False` up to the first test that fails.

        Raises:
            EOFError: the descriptor `lifeline` is hung up.
        """
        nonce = secrets.token_hex(16) if cases.kind == "asserts" else ""
        request = {"program": program, "kind": cases.kind, "fn_name": cases.fn_name, "tests": cases.inputs}
        sent = json.dumps(request | {"nonce": nonce}).encode() + b"\n"
        passed: list[bool] = []
        is_started = False
        try:
            for status, output in self._exchange(sent, Frames(cases.max_output_bytes), lifeline):
                if status == STARTED:
                    is_started = True
                    continue
                if status not in (OK, ERROR):
                    raise _Ended(limit=Limit(status))
                passed.append(status == OK and output is not None and cases.is_passed(len(passed), output, nonce))
                if len(passed) == len(cases.inputs) or not (passed[-1] or runs_all):
                    break
        except _Ended as ended:
            return ProgramOutcome(tuple(passed), ended.limit, ended.error, is_started)
        return ProgramOutcome(tuple(passed))

    def execute(self, program: str) -> str:
        """Runs a program; returns what it prints, the traceback of what it raises, and which limit it exceeded.

        Raises:
            RuntimeError: the sandbox ended.
        """
        request = {"program": _SCRIPT.format(program), "kind": "stdin", "tests": [""]}
        answers = self._exchange(json.dumps(request).encode() + b"\n", Frames(self._config.max_output_bytes), None)
        try:
            status, output = next(answer for answer in answers if answer[0] != STARTED)
        except _Ended as ended:
            if ended.limit is None:
                raise RuntimeError(ended.error) from ended
            status = ended.limit.value
            output = b""
        if status not in (OK, ERROR):
            return f"[the program was ended: it exceeded the limit of {status}]"
        text = (output or b"").decode(errors="replace")
        return (text or "[the program printed nothing]") + ("\n[it ended with an error]" if status == ERROR else "")

    def _exchange(self, request: bytes, frames: Frames, lifeline: int | None) -> Iterator[tuple[str, bytes | None]]:
        """Sends a request to guest.py and yields the status and the output of each test.

        Raises:
            _Ended: no answer comes any more, or the program has exceeded a limit.
            EOFError: the descriptor `lifeline` is hung up.
        """
        left = memoryview(request)
        watch = Watch(self._process.pid, self._bounds(), num_own_threads=1 if self._config.unsafe else 2)
        checked_s = watch.started_s
        os.set_blocking(self._stdin.fileno(), False)
        poller = select.poll()
        poller.register(self._stdin, select.POLLOUT)
        poller.register(self._stdout, select.POLLIN)
        if lifeline is not None:
            poller.register(lifeline, 0)
        while True:
            ready = {fd for fd, _ in poller.poll(POLL_INTERVAL_S * 1000)}
            if lifeline in ready:
                raise EOFError
            if self._stdin.fileno() in ready:
                with suppress(BrokenPipeError):  # the guest has ended, and its stdout, too
                    left = left[os.write(self._stdin.fileno(), left[:_CHUNK_BYTES]) :]
                if not left:
                    poller.unregister(self._stdin)
            if self._stdout.fileno() in ready:
                if not (chunk := os.read(self._stdout.fileno(), _CHUNK_BYTES)):
                    raise _Ended(f"the sandbox ended: {self._reason()}")
                try:
                    yield from frames.feed(chunk)
                except ValueError as error:
                    raise _Ended(f"the sandbox gave no answer: {error}") from error
            if (now_s := time.monotonic()) - checked_s > POLL_INTERVAL_S:
                checked_s = now_s
                _check(watch)

    def _bounds(self) -> Bounds:
        """Returns what all processes of the program may use together, which the process outside measures."""
        config = self._config
        return Bounds(
            cpu_s=config.timeout_s,
            wall_s=wall_s(config),
            memory_bytes=config.memory_mb << 20,
            num_threads=config.max_processes,
            file_bytes=TMP_BYTES,
            files=None if config.unsafe else "/tmp",  # noqa: S108 - the sandbox's own
        )

    def _reason(self) -> str:
        """Returns why the sandbox ended: its stderr text, which no program can write; if empty, its exit code."""
        exit_code = exit_code_within(self._process, _EXIT_LIMIT_S)
        os.set_blocking(self._stderr.fileno(), False)
        reason = self._stderr.read(_MAX_REASON_BYTES) or b""
        return reason.decode(errors="replace").strip() or f"exit code {exit_code}"


def _check(watch: Watch) -> None:
    """Raises _Ended if all processes of the sandbox together exceed a resource limit."""
    if (limit := watch.exceeded()) is not None:
        raise _Ended(limit=limit)


@dataclass(eq=False)
class _Ended(Exception):
    """Raised when a sandbox gives no further answer: with the error, or with the limit that its program exceeded."""

    error: str = ""
    limit: Limit | None = None
