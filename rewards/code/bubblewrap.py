"""Builds the bubblewrap command that starts a sandbox: the files that the sandbox sees, and its user.

A sandbox has namespaces of its own for mounts, processes, network, IPC and host name. It sees the interpreter, its
standard library and the shared libraries, read-only, an empty /tmp in memory, and nothing else: no /proc, no shell, no
files of the run, no environment.

* If an ordinary user starts it, it also has a user namespace of its own, where its user is nobody.
* If root starts it, it changes to a uid that no other process has, because the kernel does not limit root's processes.
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
# A user namespace of its own, with one user and nothing else.
IN_USER_NAMESPACE = ("--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY))
# The first uid of sandboxes that root starts; far from the uids of people and containers.
_FIRST_UID = 2_000_000_000
_SHARED_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "1",  # else each thread takes 64 MB of address space, which is limited
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # the same hashes, so the same output, in every sandbox
}
# Nothing of the site-packages of this environment.
_PYTHON_FLAGS = ("-s", "-S", "-P", "-B")
HINT = "docs/deployment.md says what a sandbox needs; reward.code.unsafe=true runs code without one"


class NoSandbox(Exception):
    """Raised if no sandbox can be started on this machine; the message gives the reason."""


def is_root() -> bool:
    """Returns True if this process runs as root of the machine; root of a user namespace does not count."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]


def own_uid(number: int, pid: int | None = None) -> int:
    """Returns the uid under which sandbox `number` of process `pid` (default: this one) runs; 0 if this is not root.

    If this process is not root, the sandbox's user is nobody in a user namespace of its own.
    """
    return _FIRST_UID + ((pid or os.getpid()) % 100_000 * 1000 + number % 1000) if is_root() else 0


def interpreter() -> str:
    """Returns the path of this Python interpreter outside of its virtual environment; it runs programs in sandboxes."""
    return os.path.realpath(sys.executable)


def python_command(guest: str = str(GUEST)) -> list[str]:
    """Returns the command that starts the Python script `guest` inside a sandbox."""
    return [interpreter(), *_PYTHON_FLAGS, guest]


def isolated(hostname: str = "sandbox") -> list[str]:
    """Returns the first part of a bubblewrap command: isolation from network, other processes, files and capabilities.

    Raises:
        NoSandbox: bubblewrap is not installed.
    """
    if (bwrap := shutil.which("bwrap")) is None:
        raise NoSandbox("bubblewrap (bwrap) is not installed")
    command = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    return [*command, "--die-with-parent", "--as-pid-1", "--hostname", hostname, "--cap-drop", "ALL"]


def sandbox_command(seccomp_fd: int) -> list[str]:
    """Returns the bubblewrap command that starts guest.py in a sandbox with the system call filter in `seccomp_fd`.

    Raises:
        NoSandbox: bubblewrap is not installed.
    """
    command = isolated()
    if is_root():
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += IN_USER_NAMESPACE
    return [*command, *_view(), "--seccomp", str(seccomp_fd), *python_command("/guest.py")]


@cache
def _view() -> tuple[str, ...]:
    """Returns the options of bubblewrap that mount a sandbox's files: Python, shared libraries, guest.py and /tmp."""
    options: list[str] = []
    for place in _of_python():
        options += [*_folders_above(place), "--ro-bind", place, place]
    options += shared_libraries()
    for device in ("null", "urandom"):
        options += [*_folders_above(f"/dev/{device}"), "--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    options += ["--ro-bind", str(GUEST), "/guest.py", "--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
    return (*options, "--remount-ro", "/", "--chdir", "/tmp")


def shared_libraries() -> Iterator[str]:
    """Yields the options of bubblewrap that mount the folders of shared libraries; a symbolic link stays a link."""
    for place in _SHARED_LIBRARIES:
        yield from _folders_above(place)
        if Path(place).is_symlink():
            yield from ("--symlink", str(Path(place).readlink()), place)
        else:
            yield from ("--ro-bind-try", place, place)


def _of_python() -> Iterator[str]:
    """Yields the paths that Python needs: interpreter, standard library, and libpython if the interpreter loads it."""
    yield interpreter()
    yield from dict.fromkeys(os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
    library = Path(sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("LDLIBRARY") or "")
    if library.suffix != ".a":
        yield from (str(file) for file in library.parent.glob(f"{library.stem}*") if ".so" in file.name)


def _folders_above(place: str) -> Iterator[str]:
    """Yields the options of bubblewrap that make the folders above a path, readable for all users.

    Folders that bubblewrap makes by itself can be read by root alone.
    """
    for folder in reversed(Path(place).parents[:-1]):
        yield from ("--perms", "0755", "--dir", str(folder))
