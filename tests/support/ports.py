"""Reads from /proc the addresses at which processes listen, as `ss -ltnp` does."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterable
from pathlib import Path

_LISTEN = "0A"


def listening(pids: Iterable[int]) -> set[str]:
    """Returns the addresses host:port at which processes listen, of TCP over IPv4 and IPv6."""
    addresses = set()
    for pid in pids:
        inodes = _socket_inodes(pid)
        tables = "".join(Path(f"/proc/{pid}/net/{table}").read_text() for table in ("tcp", "tcp6"))
        addresses |= {address for address, inode in read_tables(tables) if inode in inodes}
    return addresses


def read_tables(text: str) -> list[tuple[str, str]]:
    """Returns (address host:port, inode) of every listening socket in the text of /proc/net/tcp and tcp6."""
    rows = (line.split() for line in text.splitlines())
    return [(_address(row[1]), row[9]) for row in rows if len(row) > 9 and row[3] == _LISTEN]


def is_loopback(address: str) -> bool:
    """Returns True if only this machine can reach the address host:port."""
    host = ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    mapped = getattr(host, "ipv4_mapped", None)
    return (mapped or host).is_loopback


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it has been closed
            inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    return inodes


def _address(local: str) -> str:
    """Returns host:port for the kernel's form: hexadecimal 32-bit words in the machine's order, then the port."""
    words, port = local.split(":")
    packed = b"".join(bytes.fromhex(words[start : start + 8])[::-1] for start in range(0, len(words), 8))
    host = ipaddress.ip_address(packed)
    return f"{host if host.version == 4 else f'[{host}]'}:{int(port, 16)}"
