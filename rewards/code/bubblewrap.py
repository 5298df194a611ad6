"""The command that starts a sandbox: what it sees, as whom it runs, and why none can be started.

A sandbox has namespaces of its own for mounts, processes, network, IPC and host name. It sees the interpreter, its
standard library and the shared libraries, read-only, an empty /tmp in memory, and nothing else: no /proc, no shell, no
files of the run, no environment.

* Started by an ordinary user it is in a user namespace of its own as well, where it is nobody.
* Started by root, whom the kernel exempts from limits on processes, it drops to a uid that nobody else has.
"""

# ruff: noqa: S108 - /tmp is the sandbox's own

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from rewards.code.limits import TMP_BYTES

GUEST = Path(__file__).with_name("guest.py")
NOBODY = 65534
# The uids of sandboxes that root starts; far from those of people and containers.
_FIRST_UID = 2_000_000_000
_SHARED_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "1",  # else each thread takes 64 MB of address space, which is limited
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
# Nothing of the environment's site-packages; the same hashes, hence the same output, in every sandbox.
_PYTHON_FLAGS = ("-s", "-S", "-P", "-B")
HINT = "docs/deployment.md says what it takes; reward.code.unsafe=true runs code without one"


class NoSandbox(Exception):
    """Sandboxes cannot be started here; the message says why."""


def is_root() -> bool:
    """Returns True if this is root of the machine, and not of a user namespace."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]


def own_uid(number: int, pid: int | None = None) -> int:
    """The uid that sandbox `number` of process `pid`, by default this one, drops to; 0 where it need not."""
    return _FIRST_UID + ((pid or os.getpid()) % 100_000 * 1000 + number % 1000) if is_root() else 0


def interpreter() -> str:
    """The interpreter that runs the programs: this one, without its virtual environment."""
    return os.path.realpath(sys.executable)


def python_command(guest: str = str(GUEST)) -> list[str]:
    """Returns the command that runs in a sandbox."""
    return [interpreter(), *_PYTHON_FLAGS, guest]


def isolated(hostname: str = "sandbox") -> list[str]:
    """Starts a program that sees no network, no other process and no file, and has no capability.

    Raises:
        NoSandbox: bubblewrap is not installed.
    """
    if (bwrap := shutil.which("bwrap")) is None:
        raise NoSandbox("bubblewrap (bwrap) is not installed")
    command = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    return [*command, "--die-with-parent", "--as-pid-1", "--hostname", hostname, "--cap-drop", "ALL"]


def sandbox_command(seccomp_fd: int) -> list[str]:
    """Starts the interpreter in a sandbox; `seccomp_fd` has the filter. NoSandbox if bubblewrap is not installed."""
    command = isolated()
    if is_root():
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    return [*command, *_view(), "--seccomp", str(seccomp_fd), *python_command("/guest.py")]


@cache
def _view() -> tuple[str, ...]:
    """Returns bubblewrap's options for the files that a sandbox sees."""
    options: list[str] = []
    for place in _of_python():
        options += [*_folders_above(place), "--ro-bind", place, place]
    options += shared_libraries()
    for device in ("null", "urandom"):
        options += [*_folders_above(f"/dev/{device}"), "--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    options += ["--ro-bind", str(GUEST), "/guest.py", "--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
    return (*options, "--remount-ro", "/", "--chdir", "/tmp")


def shared_libraries() -> Iterator[str]:
    """Yields bubblewrap's options for the libraries that programs need: bound, or a link where this machine has one."""
    for place in _SHARED_LIBRARIES:
        yield from _folders_above(place)
        if Path(place).is_symlink():
            yield from ("--symlink", str(Path(place).readlink()), place)
        else:
            yield from ("--ro-bind-try", place, place)


def _of_python() -> Iterator[str]:
    """The interpreter, its standard library, and libpython where the interpreter needs it."""
    yield interpreter()
    yield from dict.fromkeys(os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
    library = Path(sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("LDLIBRARY") or "")
    if library.suffix != ".a":
        yield from (str(one) for one in library.parent.glob(f"{library.stem}*") if ".so" in one.name)


def _folders_above(place: str) -> Iterator[str]:
    """Makes the folders that a place lies in, open to the uid that a sandbox drops to: left alone, they are root's."""
    for folder in reversed(Path(place).parents[:-1]):
        yield from ("--perms", "0755", "--dir", str(folder))
