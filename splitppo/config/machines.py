"""Rules of groups that span several machines, and of what may listen where (docs/deployment.md)."""

from collections.abc import Iterable

from splitppo.config.section import RoleName
from splitppo.config.security import is_loopback
from splitppo.config.services import ServiceConfig, ServicesConfig


def check_machines(services: ServicesConfig, roles: Iterable[RoleName]) -> None:
    """ValueError where a group of several machines cannot meet, or two groups would have one port."""
    taken: dict[str, str] = {}  # by address, the key that has it
    for role in roles:
        service, section = services.of(role), f"services.{role}"
        if service.nnodes > 1:
            _check_meeting_place(service, section, services.launch)
        for key, address in _ports(service, section, services.launch):
            if other := taken.get(address):
                raise ValueError(f"{key} and {other} are both {address}: give each a port of its own")
            taken[address] = key


def _check_meeting_place(service: ServiceConfig, section: str, launch: str) -> None:
    several = f"because {section}.nnodes is {service.nnodes}"
    if launch == "local":
        raise ValueError(
            f"services.launch is local, which starts groups on this machine alone: expected external, {several}"
        )
    if not service.master_addr:
        raise ValueError(f"{section}.master_addr: expected the name of machine 0 of the group, {several}")
    if is_loopback(f"{service.master_addr}:0"):
        raise ValueError(
            f"{section}.master_addr is {service.master_addr!r}, which means another machine on each machine: expected"
            f" a name or an address that all of them reach, {several}"
        )


def _ports(service: ServiceConfig, section: str, launch: str) -> Iterable[tuple[str, str]]:
    """(key, host:port) of what must be a group's own."""
    if service.nnodes > 1:
        yield f"{section}.master_addr and master_port", f"{service.master_addr}:{service.master_port}"
    if launch == "external" and service.address:
        yield f"{section}.address", service.address
