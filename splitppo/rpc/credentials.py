"""Loads a process's credentials (TLS identity, bearer tokens), and opens gRPC channels and ports that use them."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from splitppo.config.section import RoleName
from splitppo.config.sections.services import ServicesConfig
from splitppo.config.subsections.security import SecurityConfig
from splitppo.rpc.bearer_tokens import BearerTokens, load_tokens
from splitppo.rpc.channel_options import CLIENT_OPTIONS, Options

if TYPE_CHECKING:
    from splitppo.rpc.certificates import Identity


@dataclass(frozen=True)
class Credentials:
    """The TLS identity and the bearer tokens of a process, with which it opens gRPC channels and ports."""

    identity: "Identity | None" = None  # None: plaintext
    tokens: BearerTokens | None = None  # None: no token is sent or asked for

    def channel(self, address: str, api: Any = grpc.aio, options: Options = CLIENT_OPTIONS) -> Any:
        """Opens a gRPC channel that shows this process's certificate and adds a bearer token to calls.

        The server must show a certificate for `address` (host:port). `api` is grpc for callers without an event loop.
        """
        if self.identity is None:
            channel = api.insecure_channel(address, options=list(options))
        else:
            shown = grpc.ssl_channel_credentials(self.identity.ca, self.identity.key, self.identity.certificate)
            channel = api.secure_channel(address, shown, options=list(options))
        return channel if self.tokens is None else _TokenChannel(channel, self.tokens)

    def listen(self, server: grpc.aio.Server, bind: str) -> int:
        """Adds a port at `bind` to a gRPC server and returns its number.

        With TLS, callers must show a trusted certificate.
        """
        if self.identity is None:
            return server.add_insecure_port(bind)
        pair = (self.identity.key, self.identity.certificate)
        required = grpc.ssl_server_credentials([pair], self.identity.ca, require_client_auth=True)
        return server.add_secure_port(bind, required)


# For a wire that only this machine sees.
PLAINTEXT = Credentials()


def load_credentials(config: SecurityConfig, role: str) -> Credentials:
    """Reads the certificates, key and bearer tokens that `services.security` names for the process of a role.

    Raises:
        ConfigError: a file or variable cannot be used.
    """
    identity = None
    if (files := config.tls_files(role)) is not None:
        # Imported late: its library is slow to import, and only TLS needs it.
        from splitppo.rpc.certificates import load_identity

        identity = load_identity(*files)
    return Credentials(identity, load_tokens(config))


def load_server_credentials(config: ServicesConfig, role: RoleName) -> Credentials:
    """Reads the credentials of a service, and checks that its certificate is for the host of its address.

    The check is made if the service is started externally. Raises ConfigError if the certificate is for another host.
    """
    credentials = load_credentials(config.security, role)
    address = config.of(role).address
    files = config.security.tls_files(role)
    if config.launch == "external" and address and files is not None and credentials.identity is not None:
        from splitppo.rpc.certificates import check_names

        host = address.rpartition(":")[0].strip("[]")
        check_names(credentials.identity, host, key=f"services.{role}.address", cert_file=files[1])
    return credentials


class _TokenChannel:
    """A gRPC channel, blocking or not, that adds the bearer token to each call."""

    def __init__(self, channel: Any, tokens: BearerTokens) -> None:
        self._channel = channel
        self._metadata = tokens.metadata

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._channel, name)
        if name not in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return attribute
        return lambda *args, **kwargs: functools.partial(attribute(*args, **kwargs), metadata=self._metadata)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
