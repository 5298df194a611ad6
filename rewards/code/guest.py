"""Runs inside a sandbox, as its first process: one program, one test after the other, each in a process of its own.

Standard library only: nothing else of ours is there. It waits, warm, for one request on stdin, a line of JSON, and ends
when it has been answered. It writes "started 0", then for each test a line "STATUS SIZE" and SIZE bytes of output to
stdout; what was expected is not here, so a program cannot look it up.
"""

# ruff: noqa: S102 - exec is what this is for

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
_DAEMON_LIMIT_S = 0.2  # what was killed is gone by then
# What a program's last exception says about limits, as the exit code of its process.
_EXIT_ERROR, _EXIT_CODES = 1, {77: "memory", 78: "processes", 79: "files"}
_RESULT_FD = 3

# What programs in the style of contest sites take for granted; imported while the sandbox waits.
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
    """Takes on its limits, then waits for the request."""
    # The kernel keeps programs from signalling the first process, but for signals that it handles.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    limits = json.loads(sys.argv[1])
    os.nice(limits["nice"])
    if uid := limits["uid"]:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    names: dict[str, Any] = {}
    exec(_PRELUDE, names)
    # Where a program finds them, and yet has to define itself what is asked of it.
    vars(builtins).update(names | {"exit": sys.exit, "quit": sys.exit})
    request = json.loads(_read_line())
    _write_all(b"started 0\n")
    for test in request["tests"]:
        status, output = _run(request, test, limits)
        limits["output_bytes"] -= len(output)
        _write_all(b"%s %d\n" % (status.encode(), len(output)) + output)


def _run(request: dict[str, Any], test: Any, limits: dict[str, Any]) -> tuple[str, bytes]:
    """Runs one test; its status and what it gave."""
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
        given, has_room = _exchange(pid, stdin_writer, output_reader, text, limits["output_bytes"])
    finally:
        _kill_group(pid)
        os.close(output_reader)
    _, code = os.waitpid(pid, 0)
    if not has_room:
        return "output", b""
    if _is_anyone_left():
        return "processes", b""
    if limit := _EXIT_CODES.get(os.waitstatus_to_exitcode(code)):
        return limit, b""
    return ("ok" if code == 0 else "error"), given


def _exchange(pid: int, stdin: int, output: int, text: bytes, max_bytes: int) -> tuple[bytes, bool]:
    """Feeds a process and reads from it until it ends, whoever else holds its pipes; and whether it gave few enough."""
    ended, poller = os.pidfd_open(pid), select.poll()
    given, left = bytearray(), memoryview(text)
    for fd in (stdin, output):
        os.set_blocking(fd, False)
    poller.register(ended, select.POLLIN)
    poller.register(output, select.POLLIN)
    poller.register(stdin, select.POLLOUT)
    poller.register(0, 0)
    is_open = True
    while len(given) <= max_bytes:
        ready = dict(poller.poll())
        if 0 in ready:  # whoever started this sandbox is gone
            _kill_group(pid)
            sys.exit(1)
        if is_open and stdin in ready:
            left = left[_write_some(stdin, left) :]
            if not left:
                is_open = False
                poller.unregister(stdin)
                os.close(stdin)
        if output in ready:
            chunk = _read_some(output)
            given += chunk
            if not chunk:
                poller.unregister(output)
        elif ended in ready:
            break
    if is_open:
        os.close(stdin)
    os.close(ended)
    return bytes(given), len(given) <= max_bytes


def _confine(stdin: int, output: int, *, is_stdin: bool, limits: dict[str, Any]) -> None:
    """A session of its own, only its own pipes, and the limits of the kernel."""
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
    """Runs program and test in this process, which ends here."""
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
    except BaseException as error:  # noqa: BLE001 - it is the program's
        code = _exit_code(error)
    finally:
        os._exit(code)


def _names_in(code: CodeType) -> set[str]:
    """The names that statements use, also inside the functions that they define."""
    return set(code.co_names).union(*(_names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _exit_code(error: BaseException) -> int:
    if isinstance(error, MemoryError):
        return 77
    if isinstance(error, BlockingIOError) or "start new thread" in str(error):
        return 78
    return 79 if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG) else _EXIT_ERROR


def _is_anyone_left() -> bool:
    """Returns True if processes outlive the program, out of its session; this first process inherits them."""
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


def _read_line() -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(0, _CHUNK_BYTES)
        if not chunk:
            sys.exit(0)
        line += chunk
    return bytes(line)


def _read_some(fd: int) -> bytes:
    try:
        return os.read(fd, _CHUNK_BYTES)
    except BlockingIOError:
        return b""


def _write_some(fd: int, data: memoryview) -> int:
    """Writes some bytes, and returns how many are done with; all of them if nobody reads them."""
    try:
        return os.write(fd, data[:_CHUNK_BYTES])
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(data)


def _write_all(data: bytes, fd: int = 1) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


if __name__ == "__main__":
    main()
