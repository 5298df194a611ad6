"""This machine's place in a group of several machines: its number, its interface, and where the machines meet.

Read before torch is imported; what is wrong with the network is said before anything waits for it.
"""

import array
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from splitppo.config import ConfigError, ServiceConfig

# What schedulers number the machines of a job with, from 0: Slurm, an indexed Job of Kubernetes.
_SCHEDULERS = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")
_GET_IPV4_ADDRESS = 0x8915  # SIOCGIFADDR
_DISCARD_PORT = 9  # nothing is sent to it


@dataclass(frozen=True)
class Machine:
    """One machine of a group.

    Attributes:
        section: of the configuration, services.<role>.
        node_rank: its number, from 0; the service is on machine 0.
        master_address, master_port: where machine 0 listens for the others; an IP address.
        ifname: the interface that its ranks speak over.
    """

    section: str
    node_rank: int
    master_address: str
    master_port: int
    ifname: str


def this_machine(
    service: ServiceConfig, section: str, node_rank: int | None, environment: Mapping[str, str] = os.environ
) -> Machine:
    """This one, of a group of several; ConfigError where it cannot be one of them.

    Without `node_rank` it is the number that a scheduler has left in the environment.
    """
    number = _node_rank(service, section, node_rank, environment)
    address = _master_address(service, section)
    try:
        own = own_address(address)
    except OSError as error:
        here = socket.gethostname()
        raise ConfigError(f"{section}.master_addr {address} cannot be reached from {here}: {error.strerror}") from error
    if number == 0 and own != address:
        raise ConfigError(
            f"{section}.master_addr {service.master_addr!r} is {address}, and {socket.gethostname()}, where node rank 0"
            f" is started, is {own}: expected an address of machine 0"
        )
    return Machine(section, number, address, service.master_port, _interface(service, section, own))


def _node_rank(service: ServiceConfig, section: str, given: int | None, environment: Mapping[str, str]) -> int:
    known = [environment[name] for name in _SCHEDULERS if name in environment]
    if given is None and known:
        with suppress(ValueError):
            given = int(known[0])
    expected = f"0 to {service.nnodes - 1}, because {section}.nnodes is {service.nnodes}"
    if given is None:
        raise ConfigError(f"which machine of the group is this? expected --node-rank {expected}")
    if not 0 <= given < service.nnodes:
        raise ConfigError(f"this machine's node rank is {given}, expected {expected}")
    return given


def _master_address(service: ServiceConfig, section: str) -> str:
    key = f"{section}.master_addr {service.master_addr!r}"
    try:
        found = socket.getaddrinfo(service.master_addr, service.master_port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{key} has no address on {socket.gethostname()}: {error.strerror or error}") from error
    address = str(found[0][4][0])
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise ConfigError(
            f"{key} is {address} on {socket.gethostname()}, which no other machine reaches: expected an address of"
            " the machines' network; correct /etc/hosts, or write the address itself"
        )
    return address


def own_address(master_address: str) -> str:
    """The address that this machine has where another address is; OSError where no way leads there."""
    family = socket.AF_INET6 if ":" in master_address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        route.connect((master_address, _DISCARD_PORT))
        return str(route.getsockname()[0])


def _interface(service: ServiceConfig, section: str, own_address: str) -> str:
    interfaces = [name for _, name in socket.if_nameindex()]
    if service.socket_ifname and service.socket_ifname not in interfaces:
        raise ConfigError(
            f"{section}.socket_ifname is {service.socket_ifname!r}, but {socket.gethostname()} has"
            f" {', '.join(interfaces)}"
        )
    for name in [service.socket_ifname] if service.socket_ifname else interfaces:
        if service.socket_ifname or _ipv4_address(name) == own_address:
            return name
    raise ConfigError(
        f"no interface of {socket.gethostname()} has {own_address} as its first address: expected one of"
        f" {', '.join(interfaces)} in {section}.socket_ifname"
    )


def _ipv4_address(interface: str) -> str | None:
    """The first one of an interface."""
    request = array.array("B", struct.pack("256s", interface.encode()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            fcntl.ioctl(any_socket, _GET_IPV4_ADDRESS, request)
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(request[20:24].tobytes())
