"""Sentences for users about gRPC connections that cannot be made, from gRPC's own error texts."""

from typing import NamedTuple


class TlsSettings(NamedTuple):
    """The names that error sentences use for TLS settings: keys of the configuration, or options of a command line."""

    tls: str = "services.security.tls is true here"
    ca: str = "services.security.ca_file"
    section: str = "services.security"


OF_A_RUN = TlsSettings()


def handshake_failure(details: str, settings: TlsSettings = OF_A_RUN) -> str:
    """Returns the reason for a failed TLS handshake, as the end of a sentence; "" for any other failure to connect."""
    if "Hostname Verification" in details:
        return "its certificate does not name the host that it is called by"
    lowered = details.lower()
    if "handshake failed" not in lowered:
        return ""
    if "wrong_version_number" in lowered:
        return f"it does not speak TLS, but {settings.tls}"
    if "certificate_verify_failed" in lowered:
        because = details.rpartition("CERTIFICATE_VERIFY_FAILED: ")[2].removesuffix(": OK")
        return f"its certificate is not accepted ({because}; {settings.ca})"
    return f"the TLS handshake with it fails: {details}"


def connection_hint(details: str, settings: TlsSettings = OF_A_RUN) -> str:
    """Returns a hint to TLS settings, if a worker closes the connection at once; "" for any other failure."""
    if "Socket closed" not in details:
        return ""
    return f" (it hangs up: does it want TLS, or another certificate? see {settings.section} and the worker's output)"


def why_unreachable(details: str, timeout_s: float, *, with_tls: bool, settings: TlsSettings = OF_A_RUN) -> str:
    """Returns the end of a sentence about a connection that could not be made within `timeout_s` seconds."""
    if because := handshake_failure(details, settings):
        return because
    lowered = details.lower()
    if "connection refused" in lowered:
        return "nothing listens there (connection refused)"
    if "resolving" in lowered or "dns resolution" in lowered:
        return f"its name cannot be resolved ({details})"
    if "settings frame" in lowered or "(endpoint closing)" in lowered:
        kind = "gRPC server" if with_tls else "gRPC server without TLS"
        return f"it takes connections and says nothing within {timeout_s:g} s: it hangs, or is no {kind}"
    if "handshaker shutdown" in lowered or "timed out" in lowered:
        return f"no answer within {timeout_s:g} s: another address, a firewall, or the machine is down"
    return f"{details}{connection_hint(details, settings)}"
