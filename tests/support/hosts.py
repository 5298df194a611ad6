"""Two hosts on one machine: network namespaces with a cable between them; each has a name and an /etc/hosts."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

CABLE = "cable"
# The ports that the kernel of a host gives to a process that asks for any port.
ANY_PORT = range(40_000, 41_000)
_ENTER = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Host:
    """A host: a network namespace with a name and an address."""

    name: str
    address: str
    namespace: str

    @property
    def inside(self) -> Sequence[str]:
        """The words before a command that runs on this host."""
        return ("ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", _ENTER, self.name)

    def run(self, *command: str) -> str:
        """Runs a command on this host and returns its output."""
        return subprocess.run([*self.inside, *command], check=True, capture_output=True, text=True).stdout

    def cable(self, state: str) -> None:
        """Pulls the cable ("down"), or puts it back ("up")."""
        ip("-n", self.namespace, "link", "set", CABLE, state)

    def listening(self) -> set[tuple[str, int]]:
        """Returns (address, port) of every socket that listens on this host, as `ss -tln` shows it."""
        rows = (line.split()[3] for line in self.run("ss", "-Htln").splitlines())
        sockets = (row.rpartition(":") for row in rows)
        # The prefix is of a socket for IPv6 that takes IPv4.
        return {(address.strip("[]").removeprefix("::ffff:"), int(port)) for address, _, port in sockets}


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Makes the hosts `one` and `two`; skips the test if namespaces cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    hosts = tuple(
        Host(name, f"10.213.47.{number}", f"splitppo-{name}-{os.getpid()}")
        for number, name in enumerate(("one", "two"), 1)
    )
    names = "".join(f"{host.address} {host.name}\n" for host in hosts)
    try:
        try:
            for host in hosts:
                ip("netns", "add", host.namespace)
                ip("-n", host.namespace, "link", "set", "lo", "up")
            first, second = hosts
            ip(
                "link",
                "add",
                CABLE,
                "netns",
                first.namespace,
                "type",
                "veth",
                "peer",
                "name",
                CABLE,
                "netns",
                second.namespace,
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        for host in hosts:
            ip("-n", host.namespace, "address", "add", f"{host.address}/30", "dev", CABLE)
            host.cable("up")
            _etc(host).mkdir(parents=True)
            (_etc(host) / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 me\n{names}")
            limit = f"echo {ANY_PORT.start} {ANY_PORT.stop - 1} > /proc/sys/net/ipv4/ip_local_port_range"
            host.run("sh", "-c", limit)
        yield first, second
    finally:
        for host in hosts:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", host.namespace)
            shutil.rmtree(_etc(host), ignore_errors=True)


def _etc(host: Host) -> Path:
    """Returns the folder whose files `ip netns exec` mounts over those of /etc."""
    return Path("/etc/netns") / host.namespace
