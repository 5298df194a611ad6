"""What gRPC says when it cannot connect, as sentences."""


def handshake_failure(
    details: str, *, tls: str = "services.security.tls is true here", ca: str = "services.security.ca_file"
) -> str:
    """What gRPC says of a TLS handshake that cannot succeed, as a sentence; empty for any other failure to connect.

    `tls` and `ca` are what has switched TLS on, and what names the authorities, in the words of whoever reads it.
    """
    if "Hostname Verification" in details:
        return "its certificate does not name the host that it is called by"
    lowered = details.lower()
    if "handshake failed" not in lowered:
        return ""
    if "wrong_version_number" in lowered:
        return f"it does not speak TLS, but {tls}"
    if "certificate_verify_failed" in lowered:
        because = details.rpartition("CERTIFICATE_VERIFY_FAILED: ")[2].removesuffix(": OK")
        return f"its certificate is not accepted ({because}; {ca})"
    return f"the TLS handshake with it fails: {details}"


def connection_hint(details: str, *, settings: str = "services.security") -> str:
    """What may be behind a worker that is there but hangs up, as the end of a sentence; empty for other failures."""
    if "Socket closed" not in details:
        return ""
    return f" (it hangs up: does it want TLS, or another certificate? see {settings} and the worker's output)"


def why_unreachable(
    details: str,
    timeout_s: float,
    *,
    with_tls: bool,
    tls: str = "services.security.tls is true here",
    ca: str = "services.security.ca_file",
    settings: str = "services.security",
) -> str:
    """What gRPC says of a connection that does not come about within `timeout_s`, as the end of a sentence."""
    if because := handshake_failure(details, tls=tls, ca=ca):
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
    return f"{details}{connection_hint(details, settings=settings)}"
