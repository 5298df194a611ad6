"""The sandbox of a launch script: bash and a few tools, with nothing of this machine but what `Visible` allows.

It is a sandbox as those of code answers are (`rewards/code`): bubblewrap, the same filter of system calls, the same
measurement from outside. It always has a user namespace of its own. If root starts it, its user is on the machine one
that owns nothing and that no other process has, so that the kernel limits its processes, too. All of its files but
programs and shared libraries are in memory, and come into it through descriptors: bubblewrap mounts no file of a user.

There is no /proc, with one exception. Bash needs /dev/fd for `<(...)` and `>(...)`, so scripts that contain these have
a /proc with their own processes; all else in it is covered. Where a container forbids to mount /proc, they have none.
"""

import fcntl
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from controller.commands.from_verl.shell.visible import LimitExceeded, Place, Visible
from rewards.code.bubblewrap import IN_USER_NAMESPACE, NoSandbox, isolated, own_uid, shared_libraries
from rewards.code.limits import TMP_BYTES
from rewards.code.seccomp import filter_program
from rewards.code.watch import POLL_INTERVAL_S, Bounds, Watch, end_sandbox
from splitppo.machine.children.ending import exit_code_within

ANSWERS = "/answers.bash"  # every bash in the sandbox reads this first
_TOOLS = """
awk basename cat cut date dirname env expr find grep head ls mkdir mktemp mv printf readlink realpath rm sed seq sort
tail tee touch tr uname uniq wc xargs
"""
MAX_RECORD_BYTES = 1 << 20  # of a file, also of what the runs of bash record
_MEMORY_BYTES = 512 << 20
_MAX_PROCESSES = 64
_NUM_OWN = 2  # bubblewrap, and the first process
_FIRST_FD = 200  # scripts use low numbers
# The first process waits for all others: when it ends, bubblewrap kills them.
_FIRST_PROCESS = (
    f"ulimit -c 0 -f {MAX_RECORD_BYTES >> 10} -v {_MEMORY_BYTES >> 10} -u {_MAX_PROCESSES + _NUM_OWN} -n 1024"
    f' 2>/dev/null; BASH_ENV={ANSWERS} bash "$@"; status=$?;'
    " while kill -s 0 -- -1 2>/dev/null; do :; done; exit $status"
)


@dataclass(frozen=True)
class Records:
    """The three files that one run of bash fills: its trace, the notes of answers.bash, and its error messages."""

    trace: IO[bytes]
    notes: IO[bytes]
    errors: IO[bytes]

    @property
    def is_full(self) -> bool:
        """True if the run has recorded as much as a file may have, so that more may be missing."""
        files = (self.trace, self.notes, self.errors)
        return any(os.fstat(file.fileno()).st_size >= MAX_RECORD_BYTES for file in files)


@contextmanager
def new_records() -> Iterator[Records]:
    """Makes the files for one run; they exist in a `with` block."""
    with TemporaryFile() as trace, TemporaryFile() as notes, TemporaryFile() as errors:
        yield Records(trace, notes, errors)


def text_of(record: IO[bytes]) -> str:
    """Returns what a run has recorded in one of its files."""
    record.seek(0)
    return record.read(MAX_RECORD_BYTES).decode(errors="replace")


def run_bash(
    visible: Visible,
    answers: str,
    variables: Mapping[str, str],
    arguments: Sequence[str],
    records: Records,
    ends_s: float,
    *,
    proc: bool = True,
) -> None:
    """Runs a launch script with bash in a sandbox, until it ends.

    Args:
        visible: the script, and what its sandbox gets of this machine.
        answers: the text of answers.bash; the variable _ASK_NOTES_FD is put before it.
        variables: the environment variables of the script; nothing else is in its environment but its language.
        arguments: the arguments of the script.
        records: what this run fills.
        ends_s: when the run must have ended, by `time.monotonic`.
        proc: False: the sandbox has no /proc, whatever the script contains.

    Raises:
        NoSandbox: bubblewrap is not installed, or cannot start here.
        LimitExceeded: the script does not end in time, or exceeds another limit.
    """
    with ExitStack() as stack:
        trace_fd, notes_fd = (_high_fd(stack, file.fileno()) for file in (records.trace, records.notes))
        try:
            system_calls = _memory_file(stack, filter_program())
        except ValueError as error:
            raise NoSandbox(str(error)) from error
        passed = [trace_fd, notes_fd, system_calls]
        options = [*_system(), *(_proc() if proc and visible.uses_process_substitution else ())]
        own = {ANSWERS: Place(f"_ASK_NOTES_FD={notes_fd}\n{answers}".encode())}
        own[str(visible.script.absolute())] = Place(visible.text.encode(), is_executable=True)
        for path, place in (visible.places | own).items():
            if place.content is None:
                options += ["--dir", path]
                continue
            passed.append(_memory_file(stack, place.content))
            options += ["--perms", "0755" if place.is_executable else "0644", "--file", str(passed[-1]), path]
        options += ["--dir", str(Path.cwd()), "--chdir", str(Path.cwd()), "--seccomp", str(system_calls), "--clearenv"]
        own_variables = {"LANG": "C.UTF-8", "PATH": "/bin", "BASH_XTRACEFD": str(trace_fd)}
        for name, value in {**variables, **own_variables}.items():
            options += ["--setenv", name, value]
        passed.append(
            _memory_file(stack, b"".join(option.encode(errors="surrogateescape") + b"\0" for option in options))
        )
        command = [*_bubblewrap(), "--args", str(passed[-1]), "--", "/bin/bash", "-c", _FIRST_PROCESS, "bash"]
        _wait([*command, str(visible.script.absolute()), *arguments], passed, records, ends_s, visible.script.name)


def _wait(command: Sequence[str], fds: Sequence[int], records: Records, ends_s: float, name: str) -> None:
    """Starts bubblewrap, and waits until all has ended or exceeds a limit, which is a LimitExceeded.

    Root starts it as a user that owns nothing.
    """
    uid = own_uid(0)
    as_user = {"user": uid, "group": uid, "extra_groups": ()} if uid else {}
    bounds = Bounds(
        cpu_s=ends_s - time.monotonic(),
        wall_s=ends_s - time.monotonic(),
        memory_bytes=_MEMORY_BYTES,
        num_threads=_MAX_PROCESSES,
        file_bytes=TMP_BYTES,
        files="/",
    )
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=records.errors,
            env={},
            cwd="/",
            pass_fds=fds,
            start_new_session=True,
            **as_user,  # type: ignore[call-overload]
        )
    except OSError as error:
        raise NoSandbox(f"bubblewrap cannot be started: {error.strerror}") from error
    watch = Watch(process.pid, bounds, _NUM_OWN)
    try:
        while exit_code_within(process, POLL_INTERVAL_S) is None:
            if (limit := watch.exceeded()) is not None:
                raise LimitExceeded(f"{name} exceeds the limit of {limit.value} that a launch script has")
    finally:
        end_sandbox(process)
    if records.is_full:
        raise LimitExceeded(f"{name} runs or prints more than a launch script may: over {MAX_RECORD_BYTES >> 20} MiB")


def _bubblewrap() -> list[str]:
    """Returns the command of bubblewrap up to its options, and isolation from everything."""
    return [*isolated(platform.node()), *IN_USER_NAMESPACE]


@cache
def _system() -> tuple[str, ...]:
    """Returns the options of bubblewrap for programs, shared libraries, devices and an empty file system in memory."""
    options = ["--size", str(TMP_BYTES), "--tmpfs", "/", *shared_libraries()]
    for device in ("/dev/null", "/dev/urandom"):
        options += ["--dev-bind", device, device]
    options += ["--ro-bind-try", "/etc/localtime", "/etc/localtime", "--perms", "1777", "--dir", "/tmp"]  # noqa: S108
    for name, place in [("bash", "/bin/bash"), *((name, f"/tools/{name}") for name in _TOOLS.split())]:
        # The system's programs come first: another user may not reach the programs of a Python environment.
        if program := shutil.which(name, path=os.defpath) or shutil.which(name):
            options += ["--ro-bind", os.path.realpath(program), place]
    return (*options, "--symlink", "bash", "/bin/sh", "--symlink", "/tools/env", "/usr/bin/env")


def _proc() -> Iterator[str]:
    """Yields the options of bubblewrap for a /proc that has the sandbox's own processes, and nothing else."""
    yield from ("--proc", "/proc", "--symlink", "/proc/self/fd", "/dev/fd")
    for place in Path("/proc").iterdir():
        if place.name.isdigit() or place.is_symlink():
            continue
        if place.is_dir():
            yield from ("--size", "4096", "--tmpfs", str(place), "--remount-ro", str(place))
        else:
            yield from ("--ro-bind", "/dev/null", str(place))


def _memory_file(stack: ExitStack, content: bytes) -> int:
    """Returns the descriptor of a file in memory, at its beginning, which is closed with `stack`."""
    fd = os.memfd_create("splitppo")
    stack.callback(os.close, fd)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _high_fd(stack: ExitStack, fd: int) -> int:
    """Returns another descriptor of the same file with a number that scripts do not use."""
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
    stack.callback(os.close, high)
    return high
