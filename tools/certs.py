"""Makes the certificates of services.security: a local authority, one server certificate per role, one client's.

    python tools/certs.py --out certs --hosts gpu-one,10.0.0.5 [--days 90] [--new-ca]

The authority (ca.pem, ca.key) is made once and used again, so a second call is the rotation: new certificates that
whoever trusts ca.pem accepts. Keys are readable by their owner only. Move ca.key to a safe place: no process needs it.
"""

from __future__ import annotations

import argparse
import datetime as dt
import ipaddress
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVERS = ("actor", "critic")
CLIENTS = ("controller",)
CA_DAYS = 3650
# Clocks of other machines may be a little behind.
BACKDATED = dt.timedelta(minutes=5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the files; 0, or 2 for arguments that make no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("certs"), help="folder that gets the files")
    parser.add_argument(
        "--hosts", default="localhost,127.0.0.1", help="names and addresses of the servers, with commas between"
    )
    parser.add_argument("--days", type=int, default=90, help="how long server and client certificates are valid")
    parser.add_argument("--new-ca", action="store_true", help="also a new authority, which everybody must get")
    options = parser.parse_args(arguments)
    hosts = [host.strip() for host in options.hosts.split(",") if host.strip()]
    if not hosts or options.days < 1:
        sys.stderr.write("error: --hosts needs at least one name or address, --days at least 1\n")
        return 2
    try:
        write_all(options.out, hosts, days=options.days, new_ca=options.new_ca)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(
        f"{options.out}: certificates of {', '.join([*SERVERS, *CLIENTS])} for {', '.join(hosts)}, valid for"
        f" {options.days} days\nkeep {options.out / 'ca.key'} somewhere else; in the configuration of the run:\n\n"
        f"services:\n  security:\n    tls: true\n    ca_file: {options.out}/ca.pem\n"
        f'    cert_file: "{options.out}/{{role}}.pem"\n    key_file: "{options.out}/{{role}}.key"\n'
    )
    return 0


def write_all(out: Path, hosts: Sequence[str], *, days: int, new_ca: bool = False) -> None:
    """The authority, where there is none, and fresh certificates of all roles.

    Args:
        out: the folder.
        hosts: names and IP addresses that the servers are called by.
        days: how long the certificates of the roles are valid.
        new_ca: replaces an authority that is there.

    Raises:
        ValueError: the authority that is there cannot be used.
    """
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    now = dt.datetime.now(dt.UTC)
    if new_ca or not (out / "ca.pem").exists():
        authority, key = make_authority(now)
        write_pair(out / "ca", authority, key)
    else:
        authority, key = read_authority(out)
    until = now + dt.timedelta(days=days)
    for role in SERVERS:
        names = [*hosts, *(host for host in ("localhost", "127.0.0.1") if host not in hosts)]
        write_pair(out / role, *make_certificate(role, authority, key, now, until, hosts=names))
    for role in CLIENTS:
        write_pair(out / role, *make_certificate(role, authority, key, now, until))


def make_authority(now: dt.datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A self-signed authority, good for `CA_DAYS`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("SplitPPO authority")
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, name, key, now, now + dt.timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def make_certificate(
    role: str,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    now: dt.datetime,
    until: dt.datetime,
    *,
    hosts: Sequence[str] = (),
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A certificate of a role: with hosts a server's, which cannot be used to call anybody; else a client's."""
    key = ec.generate_private_key(ec.SECP256R1())
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = (
        _builder(_name(f"SplitPPO {role}"), authority.subject, key, now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), False)
    return builder.sign(authority_key, hashes.SHA256()), key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: dt.datetime, until: dt.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(until)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def read_authority(out: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The authority in a folder and its key; ValueError where they cannot be used."""
    if not (out / "ca.key").exists():
        raise ValueError(f"{out / 'ca.key'} is missing: bring it back, or make a new authority with --new-ca")
    key = serialization.load_pem_private_key((out / "ca.key").read_bytes(), password=None)
    certificate = x509.load_pem_x509_certificate((out / "ca.pem").read_bytes())
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ValueError(f"{out / 'ca.key'} is not the key of {out / 'ca.pem'}")
    return certificate, key


def write_pair(stem: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    """<stem>.pem and <stem>.key, each in one step; the key first, and at no moment readable by others."""
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _replace(stem.with_suffix(".key"), pem, 0o600)
    _replace(stem.with_suffix(".pem"), certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def _replace(path: Path, content: bytes, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
