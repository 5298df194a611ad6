"""What can be said of a placement before anything starts: its groups against the recipe, certificates against hosts."""

import fnmatch
from collections.abc import Mapping
from pathlib import Path

from cryptography import x509

from deploy.placement import PORTS
from splitppo.config import Config, ConfigError


def check_groups(config: Config, num_nodes: Mapping[str, int]) -> None:
    """ConfigError for nodes of a group that the recipe does not have, and for a group without nodes."""
    for role in PORTS:
        name, has_group = f"{role.upper()}_NODES", role in config.roles
        if has_group and not num_nodes[role]:
            raise ConfigError(f"{name} is 0, but this recipe has a group {role}: expected 1 or more")
        if num_nodes[role] and not has_group:
            raise ConfigError(f"{name} is {num_nodes[role]}, but this recipe has no group {role}: expected 0")


def check_names_host(certificate: Path, host: str) -> None:
    """ConfigError for a server's certificate that does not name the host that the controller calls it by."""
    try:
        extensions = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions
    except ValueError as error:
        raise ConfigError(f"{certificate} holds no usable PEM certificate") from error
    kind = x509.SubjectAlternativeName
    names = [str(one.value) for extension in extensions if isinstance(extension.value, kind) for one in extension.value]
    if not any(fnmatch.fnmatchcase(host, name) for name in names):
        raise ConfigError(f"{certificate} names {', '.join(names)}, expected {host}: make certs HOSTS={host}")
