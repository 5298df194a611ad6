"""The configuration section `services.security`: who may call a service, and whether gRPC uses TLS.

The section holds paths and names, never a secret.
"""

import ipaddress
import re
from pathlib import Path

from pydantic import Field

from splitppo.config.section import Section

_HOST_AND_PORT = re.compile(r"(\[(?P<v6>[^\[\]]+)\]|(?P<host>[^:\[\]]+)):\d+")


class SecurityConfig(Section):
    """The settings of mutual TLS and bearer tokens between controller and services.

    Without TLS, services are served and called on loopback addresses only.
    """

    tls: bool = False
    """If true, server and client each show a certificate that ca_file has signed. ca_file, cert_file and key_file must
    then be given."""

    ca_file: Path | None = None
    """A PEM file with the certificates of the authorities that both sides trust."""

    cert_file: Path | None = None
    """A PEM file with the certificate of the process. {role} in the path stands for actor, critic, reward, rollout
    or controller."""

    key_file: Path | None = None
    """A PEM file with the private key of that certificate, without a passphrase. {role} in the path as in cert_file."""

    token_file: Path | None = None
    """A file with bearer tokens, one on each line. Callers send the first token, services accept any of them."""

    token_env: str | None = Field(None, pattern=r"^[A-Z_][A-Z0-9_]*$")
    """The name of an environment variable, in capitals, that holds the tokens in place of token_file."""

    open_health: bool = True
    """If true, health checks need no token."""

    reflection: bool = True
    """If true, services describe themselves (grpcurl list) to callers with a token."""

    def _check_keys(self) -> None:
        """Raises ValueError if files of TLS are missing or of no use, or there are two sources of the token."""
        files = {"ca_file": self.ca_file, "cert_file": self.cert_file, "key_file": self.key_file}
        missing = [name for name, path in files.items() if path is None]
        if self.tls and missing:
            raise ValueError(f"tls needs ca_file, cert_file and key_file; {' and '.join(missing)} not given")
        if not self.tls and len(missing) < len(files):
            given = next(name for name, path in files.items() if path is not None)
            raise ValueError(f"{given} is given, but tls is false: set tls to true, or leave {given} out")
        if self.token_file is not None and self.token_env is not None:
            raise ValueError("token_file and token_env are both given, expected one of them")

    def tls_files(self, role: str) -> tuple[Path, Path, Path] | None:
        """Returns the paths (ca_file, cert_file, key_file) for the process of a role; None without TLS."""
        if self.ca_file is None or self.cert_file is None or self.key_file is None:
            return None
        # One file serves every process: {role} is replaced in the paths of certificates and keys.
        cert, key = (Path(str(path).replace("{role}", role)) for path in (self.cert_file, self.key_file))
        return self.ca_file, cert, key


def is_loopback(address: str) -> bool:
    """Returns True if only this machine can reach `address` (host:port). Of host names, only localhost counts."""
    match = _HOST_AND_PORT.fullmatch(address)
    if match is None:
        return False
    host = match["v6"] or match["host"]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
