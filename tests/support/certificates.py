"""Makes certificates for tests with the project's own tool."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

from tools import certs

TOKEN = "a-token-of-the-tests-0123456789"


def secure(folder: Path, hosts: tuple[str, ...] = ("localhost", "127.0.0.1")) -> dict[str, Any]:
    """Writes certificates and a token; returns the section services.security that uses them."""
    certs.write_all(folder, hosts, days=90)
    token_file = folder / "token"
    token_file.write_text(TOKEN + "\n")
    token_file.chmod(0o600)
    return {
        "tls": True,
        "ca_file": str(folder / "ca.pem"),
        "cert_file": str(folder / "{role}.pem"),
        "key_file": str(folder / "{role}.key"),
        "token_file": str(token_file),
    }


def expire(folder: Path, role: str, *, days_ago: int = 1) -> None:
    """Replaces the certificate of a role by an expired certificate."""
    _replace(folder, role, dt.timedelta(days=-days_ago - 30), dt.timedelta(days=-days_ago))


def postpone(folder: Path, role: str) -> None:
    """Replaces the certificate of a role by a certificate that is not valid yet."""
    _replace(folder, role, dt.timedelta(days=30), dt.timedelta(days=60))


def _replace(
    folder: Path, role: str, begins: dt.timedelta, ends: dt.timedelta, hosts: tuple[str, ...] | None = None
) -> None:
    authority, key = certs.read_authority(folder)
    now = dt.datetime.now(dt.UTC)
    if hosts is None:
        hosts = (role, "localhost", "127.0.0.1") if role in certs.SERVERS else ()
    pair = certs.make_certificate(role, authority, key, now + begins, now + ends, hosts=hosts)
    certs.write_pair(folder / role, *pair)


def last(folder: Path, role: str, *, days: int) -> None:
    """Replaces the certificate of a role by a certificate that expires in so many days."""
    _replace(folder, role, dt.timedelta(days=-1), dt.timedelta(days=days))


def rename(folder: Path, role: str, host: str) -> None:
    """Replaces the certificate of a role by a certificate for this host alone."""
    _replace(folder, role, dt.timedelta(days=-1), dt.timedelta(days=30), hosts=(host,))
