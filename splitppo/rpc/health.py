"""Asks a gRPC server for its health (grpc.health.v1); prints one line of text, with an exit status for probes.

    python -m splitppo.rpc.health HOST:PORT [--service NAME] [--ca F [--cert F --key F]] [--token-file F] [--timeout S]

Exit status: 0 SERVING; 1 not serving, or not reached (the line says why); 2 wrong arguments or files. This module
imports neither the configuration nor the libraries behind it, because probes start it every few seconds.
"""

import argparse
import os
import re
import ssl
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    # The line says already what gRPC logs of failed handshakes; gRPC reads this variable when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from splitppo.config_error import ConfigError, config_errors
from splitppo.rpc.bearer_tokens import BearerTokens
from splitppo.rpc.channel_options import answering_within
from splitppo.rpc.connection_failures import TlsSettings, why_unreachable
from splitppo.rpc.secret_files import read_file

_CHECK = "/grpc.health.v1.Health/Check"
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(\d{1,5})")
_MAX_TIMEOUT_S = 3600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Asks the server of the command line for its health, prints one line of text, and returns the exit status."""
    options = _parse(arguments)
    try:
        _check_arguments(options)
        tls = None if options.ca is None else _credentials(options)
        tokens = None if options.token_file is None else _tokens(options.token_file)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    status = check(options.address, options.service, tls, tokens, options.timeout)
    line = f"{options.address} {options.service}".strip()
    sys.stdout.write(f"{line}: {' '.join(status.split())}\n")  # the status may be any text of a server
    return 0 if status == "SERVING" else 1


def check(
    address: str, service: str, tls: grpc.ChannelCredentials | None, tokens: BearerTokens | None, timeout_s: float
) -> str:
    """Asks a gRPC server for its health; returns SERVING, NOT_SERVING, UNKNOWN, or a sentence why it has no status.

    Args:
        address: host:port.
        service: full name of a service; "" asks for the server as a whole.
        tls: credentials; None: plaintext.
        tokens: the first is sent with the call; None: none is.
        timeout_s: the longest time for everything, also for names that cannot be resolved and addresses that answer
            nothing.
    """
    options = answering_within(timeout_s)
    metadata = () if tokens is None else tokens.metadata
    if tls is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        channel = grpc.secure_channel(address, tls, options=options)
    with channel:
        try:
            request = HealthCheckRequest(service=service).SerializeToString()
            answer = channel.unary_unary(_CHECK, None, None)(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            code = error.code()
            details = error.details() or ""
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"unreachable: no answer within {timeout_s:g} s"
            if code is grpc.StatusCode.UNAVAILABLE:
                settings = TlsSettings(tls="--ca is given", ca="--ca", section="--ca, --cert, --key")
                reason = why_unreachable(details, timeout_s, with_tls=tls is not None, settings=settings)
                return f"unreachable: {reason}"
            return _why_refused(code, details)
    return _status_in(answer)


def _status_in(answer: bytes) -> str:
    """Returns the status name in a serialised HealthCheckResponse; a sentence if the bytes are something else."""
    with suppress(DecodeError, ValueError):
        return str(HealthCheckResponse.ServingStatus.Name(HealthCheckResponse.FromString(answer).status))
    return "its answer is no grpc.health.v1.HealthCheckResponse"


def _why_refused(code: grpc.StatusCode, details: str) -> str:
    """Returns a sentence that says why a server that was reached has refused a health check."""
    if code is grpc.StatusCode.NOT_FOUND:
        return "not found: the server has no service of this name"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "not a health service: the server does not have grpc.health.v1"
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return f"refused: {details} (services.security.open_health is false: --token-file)"
    return f"failed: {code.name}: {details}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m splitppo.rpc.health",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--service", default="", metavar="NAME", help="a service; by default the server as a whole")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="authorities of trusted servers; switches TLS on")
    parser.add_argument("--cert", type=Path, metavar="FILE", help="the client's certificate, for mutual TLS")
    parser.add_argument("--key", type=Path, metavar="FILE", help="its key, without passphrase")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="the first line is the token, where open_health is false"
    )
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="seconds for all of it; default 5")
    return parser.parse_args(arguments)


def _check_arguments(options: argparse.Namespace) -> None:
    """Raises ConfigError if address or timeout is not usable, or files of TLS are given without their companions."""
    match = _ADDRESS.fullmatch(options.address)
    if not match or not 0 < int(match[2]) < 1 << 16:
        raise ConfigError(f"expected HOST:PORT, got {options.address!r}")
    if not 0.0 < options.timeout <= _MAX_TIMEOUT_S:
        raise ConfigError(f"--timeout: expected seconds, over 0 and up to {_MAX_TIMEOUT_S:g}, got {options.timeout:g}")
    if (options.cert is None) != (options.key is None):
        raise ConfigError("--cert and --key belong together, got one of them")
    if options.cert is not None and options.ca is None:
        raise ConfigError("--cert and --key need --ca, the authorities whose servers are trusted")


def _credentials(options: argparse.Namespace) -> grpc.ChannelCredentials:
    """Reads the PEM files of the command line and returns TLS credentials for gRPC; raises ConfigError.

    The standard library checks the files first, because gRPC gives no reasons.
    """
    ca = read_file(options.ca, "--ca")
    context = ssl.create_default_context()
    with config_errors(ssl.SSLError, ValueError, instead=f"--ca: {options.ca} holds no usable PEM certificate"):
        context.load_verify_locations(cadata=ca.decode("ascii"))
    if options.cert is None:
        return grpc.ssl_channel_credentials(ca)
    certificate = read_file(options.cert, "--cert")
    key = read_file(options.key, "--key")
    files = f"--cert, --key: {options.cert} and {options.key}"
    with config_errors(
        ssl.SSLError, ValueError, instead=f"{files} are no PEM certificate and its key without passphrase"
    ):
        context.load_cert_chain(options.cert, options.key, password="")
    return grpc.ssl_channel_credentials(ca, key, certificate)


def _tokens(file: Path) -> BearerTokens:
    return BearerTokens.parse(read_file(file, "--token-file").decode("ascii", "replace"), f"--token-file: {file}")


if __name__ == "__main__":
    sys.exit(main())
