"""Finds out a machine's place in a group of several: node rank, network interface, address of machine 0.

This happens before torch is imported, so that a mistake in the network's settings is reported before anything waits.
"""

import ipaddress
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from splitppo.config import ConfigError, ServiceConfig

# Variables in which schedulers number the machines of a job, from 0: Slurm, an indexed Job of Kubernetes.
_SCHEDULERS = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")
_DISCARD_PORT = 9  # nothing is sent to it


@dataclass(frozen=True)
class Machine:
    """One machine of a torchrun group: its number and its network addresses.

    Attributes:
        node_rank: its number, from 0; the service is on machine 0.
        master_address: the IP address at which machine 0 listens for the others.
        ifname: the interface that its ranks speak over.
    """

    node_rank: int
    master_address: str
    ifname: str


def this_machine(
    service: ServiceConfig, section: str, node_rank: int | None, environment: Mapping[str, str] = os.environ
) -> Machine:
    """Finds node rank, master address and interface of this machine in its group; ConfigError if settings are wrong.

    `section` of the configuration is services.<role>. Without `node_rank` (None), the environment
    variables of Slurm or Kubernetes give the number.
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
    return Machine(number, address, _interface(service, section, own))


def _node_rank(service: ServiceConfig, section: str, given: int | None, environment: Mapping[str, str]) -> int:
    """Returns this machine's node rank: the given one, else the one that a scheduler has put into the environment.

    Raises:
        ConfigError: there is none, or it is not one of the group's.
    """
    numbers = [environment[name] for name in _SCHEDULERS if name in environment]
    if given is None and numbers:
        with suppress(ValueError):
            given = int(numbers[0])
    expected = f"0 to {service.nnodes - 1}, because {section}.nnodes is {service.nnodes}"
    if given is None:
        raise ConfigError(f"which machine of the group is this? expected --node-rank {expected}")
    if not 0 <= given < service.nnodes:
        raise ConfigError(f"this machine's node rank is {given}, expected {expected}")
    return given


def _master_address(service: ServiceConfig, section: str) -> str:
    """Resolves `master_addr` to an IP address that other machines can reach too.

    Raises:
        ConfigError: it has no address here, or a loopback one.
    """
    key = f"{section}.master_addr {service.master_addr!r}"
    try:
        addresses = socket.getaddrinfo(service.master_addr, service.master_port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{key} has no address on {socket.gethostname()}: {error.strerror or error}") from error
    address = str(addresses[0][4][0])
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise ConfigError(
            f"{key} is {address} on {socket.gethostname()}, which no other machine reaches: expected an address of"
            " the machines' network; correct /etc/hosts, or write the address itself"
        )
    return address


def own_address(master_address: str) -> str:
    """Returns the IP address from which this machine sends to `master_address`; OSError if there is no route."""
    family = socket.AF_INET6 if ":" in master_address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        route.connect((master_address, _DISCARD_PORT))
        return str(route.getsockname()[0])


def _interface(service: ServiceConfig, section: str, own_address: str) -> str:
    """Returns the name of the ranks' network interface: socket_ifname, else the one with this machine's address.

    Only the first address of an interface counts, because gloo listens there.
    """
    wanted = service.socket_ifname
    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        own = [address.address for address in addresses if address.family is socket.AF_INET]
        if name == wanted or (not wanted and own[:1] == [own_address]):
            return name
    names = ", ".join(interfaces)
    if wanted:
        raise ConfigError(f"{section}.socket_ifname is {wanted!r}, but {socket.gethostname()} has {names}")
    raise ConfigError(
        f"no interface of {socket.gethostname()} has {own_address} as its first address: expected one of"
        f" {names} in {section}.socket_ifname"
    )
