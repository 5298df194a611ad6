"""The first process of a sandbox: runs one program on several tests, each test in a child process.

A sandbox has only the standard library, nothing of SplitPPO. The guest waits for one request, a line of JSON on stdin.
It writes "started 0" to stdout, then for each test a line "STATUS SIZE" and SIZE bytes of output. It ends with its
stdin. The expected outputs are not in the sandbox, so that no program can read them.
"""

# ruff: noqa: S102 - this module exists to run programs by exec

import atexit
import builtins
import contextlib
import errno
import json
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType
from typing import Any, NoReturn

_CHUNK_BYTES = 1 << 16
_DAEMON_LIMIT_S = 0.2  # a process that was killed is gone by then
# Exit codes of a program's process: an error, or the limit that its last exception is about.
_EXIT_ERROR = 1
_EXIT_CODES = {77: "memory", 78: "processes", 79: "files"}
_RESULT_FD = 3

# Programs for contest sites use these names without an import. The modules are imported while the sandbox waits.
_PRELUDE = """
import bisect, collections, copy, functools, heapq, itertools, json, math, operator, os, re, string, sys, time
from typing import *
from collections import *
from heapq import *
from bisect import *
from itertools import *
from functools import *
from math import ceil, comb, factorial, floor, gcd, inf, lcm, log, log2, pi, prod, sqrt
"""


def main() -> None:
    """Reads a request from stdin, runs its tests under limits, and writes status and output of each test to stdout."""
    # A program's signals reach the first process only if this handles them, as Python does with SIGINT.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    limits = json.loads(sys.argv[1])
    sys.set_int_max_str_digits(0)  # contest sites ask for large integers; the limit on CPU time bounds them
    os.nice(limits["nice"])
    if uid := limits["uid"]:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    names: dict[str, Any] = {}
    exec(_PRELUDE, names)
    # As builtins these names are found, but a program must still define the function that is tested.
    vars(builtins).update(names | {"exit": sys.exit, "quit": sys.exit})
    with open(0, "rb", _CHUNK_BYTES, closefd=False) as stdin:
        line = stdin.readline()
    if not line.endswith(b"\n"):  # there is no program, and the sandbox has ended
        sys.exit(0)
    request = json.loads(line)
    _write_all(b"started 0\n")
    for test in request["tests"]:
        status, output = _run(request, test, limits)
        limits["output_bytes"] -= len(output)
        _write_all(b"%s %d\n" % (status.encode(), len(output)) + output)
    os.read(0, 1)  # it can be measured until the sandbox is ended


def _run(request: dict[str, Any], test: Any, limits: dict[str, Any]) -> tuple[str, bytes]:
    """Runs one test of the program in a child process; returns the test's status and the output bytes."""
    is_stdin = request["kind"] == "stdin"
    stdin, stdin_writer = os.pipe()
    output_reader, output = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_program(request, test, lambda: _confine(stdin, output, is_stdin=is_stdin, limits=limits))
    os.close(stdin)
    os.close(output)
    text = test.encode(errors="replace") if is_stdin else b""
    try:
        given = _exchange(pid, stdin_writer, output_reader, text, limits["output_bytes"])
    finally:
        _kill_group(pid)
        os.close(output_reader)
    _, code = os.waitpid(pid, 0)
    if given is None:
        return "output", b""
    if _is_anyone_left():
        return "processes", b""
    if limit := _EXIT_CODES.get(os.waitstatus_to_exitcode(code)):
        return limit, b""
    return ("ok" if code == 0 else "error"), given


def _exchange(pid: int, stdin: int, output: int, text: bytes, max_bytes: int) -> bytes | None:
    """Writes `text` to the stdin of a child process and returns its output; None if that is over `max_bytes`.

    Returns when the child process has ended, even if another process still has its pipes open. Closes `stdin`.
    """
    given = bytearray()
    left = memoryview(text)
    ended = os.pidfd_open(pid)
    poller = select.poll()
    for fd, events in ((0, 0), (stdin, select.POLLOUT), (output, select.POLLIN), (ended, select.POLLIN)):
        poller.register(fd, events)
    with open(stdin, "wb", buffering=0) as feed:
        while len(given) <= max_bytes:
            ready = dict(poller.poll())
            if 0 in ready:  # the process that has started this sandbox is gone
                _kill_group(pid)
                sys.exit(1)
            if stdin in ready:
                try:
                    left = left[os.write(stdin, left[: select.PIPE_BUF]) :]  # as many bytes as a ready pipe takes
                except BrokenPipeError:  # nobody reads them any more
                    left = left[:0]
                if not left:
                    poller.unregister(stdin)
                    feed.close()
            if output in ready:
                chunk = os.read(output, _CHUNK_BYTES)
                given += chunk
                if not chunk:
                    poller.unregister(output)
            elif ended in ready:
                break
    os.close(ended)
    return bytes(given) if len(given) <= max_bytes else None


def _confine(stdin: int, output: int, *, is_stdin: bool, limits: dict[str, Any]) -> None:
    """Isolates this child process before it runs a program: own session, only its own pipes open, resource limits."""
    os.setsid()
    nowhere = os.open("/dev/null", os.O_WRONLY)
    os.dup2(stdin, 0)
    os.dup2(output, _RESULT_FD)
    os.dup2(output if is_stdin else nowhere, 1)
    os.dup2(nowhere, 2)
    os.closerange(_RESULT_FD + (not is_stdin), 1024)
    for name, limit in limits["rlimits"].items():
        _, highest = resource.getrlimit(getattr(resource, name))
        lowest = limit if highest == resource.RLIM_INFINITY else min(limit, highest)
        resource.setrlimit(getattr(resource, name), (lowest, lowest))
    sys.setrecursionlimit(600_000)


def _be_program(request: dict[str, Any], test: Any, confine: Callable[[], None]) -> NoReturn:
    """Runs the program and one test in this child process, sends the result to the parent, and exits."""
    code = 0
    try:
        confine()
        kind = request["kind"]
        namespace: dict[str, Any] = {"__name__": "__main__" if kind == "stdin" else "answer"}
        try:
            exec(compile(request["program"], "answer.py", "exec"), namespace)
        except SystemExit:
            if kind != "stdin":
                raise
        if kind == "call":
            owner = namespace["Solution"]() if "Solution" in namespace else None
            called = getattr(owner, request["fn_name"]) if owner is not None else namespace[request["fn_name"]]
            _write_all(json.dumps(called(*test)).encode(), _RESULT_FD)
        elif kind == "asserts":
            asserts = compile(test, "asserts.py", "exec")
            if not _names_in(asserts) & (namespace.keys() - {"__name__", "__builtins__"}):
                raise NameError("the program defines nothing that is tested")
            exec(asserts, namespace)
            _write_all(request["nonce"].encode(), _RESULT_FD)
        else:
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
            atexit._run_exitfuncs()  # noqa: SLF001 - what an interpreter does at its end
            sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - a program may raise anything
        code = _exit_code(error)
    finally:
        os._exit(code)


def _names_in(code: CodeType) -> set[str]:
    """Returns the names that compiled code uses, also inside the functions that it defines."""
    return set(code.co_names).union(*(_names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _exit_code(error: BaseException) -> int:
    """Returns the exit code that tells the runner which limit an error of the program comes from, if from any."""
    if isinstance(error, MemoryError):
        return 77
    if isinstance(error, BlockingIOError) or "start new thread" in str(error):
        return 78
    return 79 if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG) else _EXIT_ERROR


def _is_anyone_left() -> bool:
    """Returns True if a process that has left the program's session is still alive after the test.

    Such a process is then a child of this process.
    """
    ends = time.monotonic() + _DAEMON_LIMIT_S
    while time.monotonic() < ends:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            time.sleep(0.001)
    return True


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _write_all(data: bytes, fd: int = 1) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


if __name__ == "__main__":
    main()
