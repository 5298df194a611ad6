"""Rules between keys about addresses: worker groups on several machines, ports, TLS and loopback (docs/hosts.md)."""

from collections.abc import Iterator

from splitppo.config.schema import Config
from splitppo.config.subsections.security import is_loopback


def machines_of_a_group_meet(config: Config) -> None:
    """Checks that a group on several machines is started externally and has a `master_addr` that all can reach."""
    for role, service in config.groups.items():
        section = f"services.{role}"
        several = f"because {section}.nnodes is {service.nnodes}"
        if service.nnodes == 1:
            continue
        if config.services.launch == "local":
            raise ValueError(
                f"services.launch is local, which starts groups on this machine alone: expected external, {several}"
            )
        if not service.master_addr:
            raise ValueError(f"{section}.master_addr: expected the name of machine 0 of the group, {several}")
        if is_loopback(f"{service.master_addr}:0"):
            raise ValueError(
                f"{section}.master_addr is {service.master_addr!r}, which means another machine on each machine:"
                f" expected a name or an address that all of them reach, {several}"
            )


def ports_are_apart(config: Config) -> None:
    """Checks that no two worker groups have the same address (host and port) to listen on."""
    taken: dict[str, str] = {}  # the key that has an address, by address
    for role, service in config.groups.items():
        addresses = {}
        if service.nnodes > 1:
            addresses[f"services.{role}.master_addr and master_port"] = f"{service.master_addr}:{service.master_port}"
        if config.services.launch == "external" and service.address:
            addresses[f"services.{role}.address"] = service.address
        for key, address in addresses.items():
            if other := taken.get(address):
                raise ValueError(f"{key} and {other} are both {address}: give each a port of its own")
            taken[address] = key


def failpoints_stay_on_this_machine(config: Config) -> None:
    """Checks that `debug.failpoints` is empty if other machines can reach a service."""
    for key, address in _reachable_from_elsewhere(config) if config.debug.failpoints else ():
        raise ValueError(
            f"debug.failpoints is for tests on one machine: expected a loopback address in {key}, got {address!r};"
            " remove debug.failpoints"
        )


def plaintext_stays_on_this_machine(config: Config) -> None:
    """Checks that TLS is on if a service listens on, or is called at, an address that is not loopback."""
    for key, address in _reachable_from_elsewhere(config) if not config.services.security.tls else ():
        if key.endswith("bind") or config.services.launch == "external":
            raise ValueError(
                f"{key} is {address!r}, which is not a loopback address, and the wire would be neither encrypted"
                " nor authenticated there: set services.security.tls, with ca_file, cert_file and key_file, or"
                " use 127.0.0.1"
            )


def _reachable_from_elsewhere(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (key, address) for each key `bind` or `address` of a worker group that is not a loopback address."""
    for role, service in config.groups.items():
        for key, address in {"bind": service.bind, "address": service.address or "localhost:0"}.items():
            if not is_loopback(address):
                yield f"services.{role}.{key}", address
