"""Reads TLS certificates and keys from PEM files, and checks them when a process starts.

A mistake then becomes one sentence, not a failed handshake later.
"""

import datetime as dt
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from splitppo.config_error import ConfigError, config_errors
from splitppo.rpc.secret_files import read_file

log = logging.getLogger(__name__)

_CA_KEY = "services.security.ca_file"
_CERT_KEY = "services.security.cert_file"

# The reader of the log has this long to make new certificates.
_WARN_BEFORE = dt.timedelta(days=14)


@dataclass(frozen=True, repr=False)  # shows no secret
class Identity:
    """The TLS identity of a process in PEM bytes: authorities it trusts, its certificate chain, and its key."""

    ca: bytes
    certificate: bytes
    key: bytes


def load_identity(ca_file: Path, cert_file: Path, key_file: Path, *, now: dt.datetime | None = None) -> Identity:
    """Reads three PEM files and checks that they can be used together at the time `now` (default: the clock's).

    `cert_file` contains the process's certificate, then those between it and the authority; `key_file` has no
    passphrase.

    Raises:
        ConfigError: a file cannot be read or is not of its kind; the key belongs to another certificate; the
            certificate is of another authority, has expired or is not valid yet. One sentence names file and time.
    """
    now = now or dt.datetime.now(dt.UTC)
    ca = read_file(ca_file, _CA_KEY)
    certificate = read_file(cert_file, _CERT_KEY)
    key = read_file(key_file, "services.security.key_file", is_secret=True)
    authorities = _certificates(ca, _CA_KEY, ca_file)
    chain = _certificates(certificate, _CERT_KEY, cert_file)
    _check_key(key, key_file, chain[0], cert_file)
    for link in chain:
        _check_time(link, _CERT_KEY, cert_file, now)
    for issuer in _issuers(chain, authorities, cert_file, ca_file):
        _check_time(issuer, _CA_KEY, ca_file, now)
    return Identity(ca, certificate, key)


def valid_until(identity: Identity) -> dt.datetime:
    """Returns the earliest time at which a certificate of a TLS identity expires: in its chain, or the authority's."""
    chain = x509.load_pem_x509_certificates(identity.certificate)
    authorities = x509.load_pem_x509_certificates(identity.ca)
    ends = [issuer.not_valid_after_utc for issuer in authorities if _is_issued_by(chain[-1], issuer)]
    return min(*(link.not_valid_after_utc for link in chain), max(ends, default=dt.datetime.max.replace(tzinfo=dt.UTC)))


def check_names(identity: Identity, host: str, *, key: str, cert_file: Path) -> None:
    """Checks that a server's certificate is for the host by which callers reach the server; raises ConfigError if not.

    `key` is the configuration key that has the host.
    """
    extensions = x509.load_pem_x509_certificates(identity.certificate)[0].extensions
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    hosts = names.get_values_for_type(x509.DNSName)
    hosts += [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    any_in_domain = f"*.{host.partition('.')[2]}"
    if not {host.lower(), any_in_domain.lower()} & {name.lower() for name in hosts}:
        raise ConfigError(
            f"{_CERT_KEY}: the certificate in {cert_file} is for {', '.join(hosts) or 'no host'}, and"
            f" {key} calls this one {host}: make one for {host}, as make certs HOSTS={host} does"
        )


def _certificates(pem: bytes, key: str, path: Path) -> list[x509.Certificate]:
    with config_errors(ValueError, instead=f"{key}: {path} holds no usable PEM certificate"):
        return x509.load_pem_x509_certificates(pem)


def _check_key(pem: bytes, key_file: Path, certificate: x509.Certificate, cert_file: Path) -> None:
    """Raises ConfigError unless a PEM key can be read without a passphrase and is the key of the certificate."""
    what = f"services.security.key_file: {key_file}"
    try:
        private_key = serialization.load_pem_private_key(pem, password=None)
    except TypeError as error:
        raise ConfigError(f"{what} is encrypted, expected a key without passphrase") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{what} holds no usable PEM private key") from error
    if private_key.public_key() != certificate.public_key():
        raise ConfigError(f"{what} is not the key of the certificate in {cert_file}")


def _check_time(certificate: x509.Certificate, key: str, path: Path, now: dt.datetime) -> None:
    """Raises ConfigError unless a certificate is valid at `now`; warns if it will expire soon."""
    begins = certificate.not_valid_before_utc
    ends = certificate.not_valid_after_utc
    what = f"{key}: the certificate in {path}"
    if now > ends:
        raise ConfigError(f"{what} has expired: it was valid until {ends:%Y-%m-%d %H:%M} UTC; make a new one")
    if now < begins:
        raise ConfigError(
            f"{what} is not valid yet: it begins at {begins:%Y-%m-%d %H:%M} UTC, this machine's clock says"
            f" {now:%Y-%m-%d %H:%M} UTC"
        )
    if ends - now < _WARN_BEFORE:
        log.warning("%s expires at %s UTC; processes that start later will refuse it", what, f"{ends:%Y-%m-%d %H:%M}")


def _issuers(
    chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate], cert_file: Path, ca_file: Path
) -> list[x509.Certificate]:
    """Checks a chain of certificates, and returns the trusted authorities that have signed the last one."""
    if not all(itertools.starmap(_is_issued_by, itertools.pairwise(chain))):
        raise ConfigError(f"{_CERT_KEY}: {cert_file} holds no chain of certificates, each signed by the next one")
    issuers = [authority for authority in authorities if _is_issued_by(chain[-1], authority)]
    if not issuers:
        raise ConfigError(f"{_CERT_KEY}: the certificate in {cert_file} is not signed by any authority in {ca_file}")
    return issuers


def _is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
