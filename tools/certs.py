"""Makes the certificates of services.security: a local authority, one server certificate per role, two clients'.

    python tools/certs.py --out certs --hosts gpu-one,10.0.0.5 [--days 90] [--new-ca | --once] [--spread ROOT]

The authority (ca.pem, ca.key) is made once and used again. A second call therefore is the rotation: it makes new
certificates, which everybody who trusts ca.pem accepts. Keys are readable by their owner only. Move ca.key to a safe
place: no process needs it.

--spread also writes ROOT/actor, critic, reward, rollout and controller, to be mounted where these processes run. Each
folder has what its processes need and no more: ca.pem, their own pair, the pair for health checks, the token of all.
--once is for deployments that call it at every start: certificates that are complete and valid for another week are
left alone, and what an earlier call has left unfinished is completed.
"""

from __future__ import annotations

import argparse
import datetime as dt
import fcntl
import ipaddress
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVERS = ("actor", "critic", "reward", "rollout")
# With a token set, `health` may check health and nothing else.
CLIENTS = ("controller", "health")
ROLES = (*SERVERS, "controller")
CA_DAYS = 3650
# Clocks of other machines may be a little behind.
BACKDATED = dt.timedelta(minutes=5)
# With --once: what ends sooner is made anew.
LEFT_ALONE = dt.timedelta(days=7)
_SECRET = 0o600
_PUBLIC = 0o644


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the files; returns 0, or 2 for arguments that make no sense and folders that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("certs"), help="folder that gets the files")
    parser.add_argument(
        "--hosts", default="localhost,127.0.0.1", help="names and addresses of the servers, with commas between"
    )
    parser.add_argument("--days", type=int, default=90, help="how long server and client certificates are valid")
    parser.add_argument("--spread", type=Path, metavar="ROOT", help="also a folder for each role in ROOT")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--new-ca", action="store_true", help="also a new authority, which everybody must get")
    either.add_argument("--once", action="store_true", help="nothing, where all is there and valid for another week")
    options = parser.parse_args(arguments)
    hosts = [host.strip() for host in options.hosts.split(",") if host.strip()]
    if not hosts or not 1 <= options.days <= CA_DAYS:
        sys.stderr.write(f"error: --hosts needs at least one name or address, --days 1 to {CA_DAYS}\n")
        return 2
    try:
        report = make(options.out, hosts, options.days, options.spread, new_ca=options.new_ca, once=options.once)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {_sentence(error) if isinstance(error, OSError) else error}\n")
        return 2
    sys.stdout.write(report)
    return 0


def make(
    out: Path, hosts: Sequence[str], days: int, root: Path | None = None, *, new_ca: bool = False, once: bool = False
) -> str:
    """Does the work of `main`, with its arguments, and returns the report. One call at a time works on a folder.

    Raises:
        ValueError: the existing authority cannot be used.
        OSError: a folder cannot be used.
    """
    if once and is_complete(out, hosts, root):
        return _left_alone(out)
    _make_folder(out)
    with _alone(out):
        because = why_incomplete(out, hosts) if once else ""
        if because or not once:
            write_all(out, hosts, days=days, new_ca=new_ca)
        if root is not None:
            spread(out, root)
    report = f"{because}: made anew\n" if because else ""
    if because or not once:
        pairs = ", ".join([*SERVERS, *CLIENTS])
        report += f"{out}: certificates of {pairs} for {', '.join(hosts)}, valid for {days} days\n"
    if root is not None:
        report += f"{', '.join(str(root / role) for role in ROLES)}: what each role needs, to be mounted as /secrets\n"
    report += f"keep {out / 'ca.key'} somewhere else; in the configuration of the run:\n\n"
    token = "" if root is None else "    token_file: /secrets/token\n"
    return f"{report}{_settings('/secrets' if root else str(out))}{token}"


def _settings(folder: str) -> str:
    return (
        f"services:\n  security:\n    tls: true\n    ca_file: {folder}/ca.pem\n"
        f'    cert_file: "{folder}/{{role}}.pem"\n    key_file: "{folder}/{{role}}.key"\n'
    )


def _left_alone(out: Path) -> str:
    ends = min(_certificate(out / f"{name}.pem").not_valid_after_utc for name in (*SERVERS, *CLIENTS))
    return f"{out}: complete and valid until {ends:%Y-%m-%d %H:%M} UTC, left as it is\n"


def write_all(out: Path, hosts: Sequence[str], *, days: int, new_ca: bool = False) -> None:
    """Writes new certificates of all roles, and the authority if there is none.

    Args:
        out: the folder.
        hosts: names and IP addresses by which the servers are called, beside the name of the role and of this machine.
        days: how long the certificates of the roles are valid.
        new_ca: replaces an existing authority.

    Raises:
        ValueError: the existing authority cannot be used.
        OSError: the folder cannot be used.
    """
    _make_folder(out)
    now = dt.datetime.now(dt.UTC)
    until = now + dt.timedelta(days=days)
    if new_ca or not (out / "ca.pem").exists():
        authority, key = make_authority(now)
        # Gone before its key changes: two generations are never taken for one authority.
        (out / "ca.pem").unlink(missing_ok=True)
        write_pair(out / "ca", authority, key)
    else:
        authority, key = read_authority(out)
        if (ends := authority.not_valid_after_utc) < until:
            raise ValueError(
                f"the authority in {out / 'ca.pem'} ends at {ends:%Y-%m-%d %H:%M} UTC, before certificates of {days}"
                " days would: a smaller --days, or a new authority with --new-ca"
            )
    for role in SERVERS:
        made = make_certificate(role, authority, key, now, until, hosts=_names(role, hosts))
        write_pair(out / role, *made)
    for client in CLIENTS:
        write_pair(out / client, *make_certificate(client, authority, key, now, until))


def _names(role: str, hosts: Iterable[str]) -> list[str]:
    """Returns the names by which a server of a role may be called; in a deployment the role may be its host."""
    return list(dict.fromkeys((role, *hosts, "localhost", "127.0.0.1")))


def spread(out: Path, root: Path) -> None:
    """Copies what the processes of each role need to a folder of its own in `root`; makes the token if there is none.

    A copy that is right is not written again. An OSError means that a folder cannot be used.
    """
    token = out / "token"
    if not _content(token).strip():
        _replace(token, f"{secrets.token_urlsafe(32)}\n".encode(), _SECRET)
    for role in ROLES:
        _make_folder(root / role)
        for name, mode in _files_of(role).items():
            if not _is_copy(out / name, root / role / name, mode):
                _replace(root / role / name, (out / name).read_bytes(), mode)


def _files_of(role: str) -> dict[str, int]:
    """Returns the files that the processes of a role need, and their modes."""
    public = dict.fromkeys(("ca.pem", f"{role}.pem", "health.pem"), _PUBLIC)
    return {**public, **dict.fromkeys((f"{role}.key", "health.key", "token"), _SECRET)}


def _is_copy(file: Path, copy: Path, mode: int) -> bool:
    content = _content(file)
    return bool(content) and _content(copy) == content and copy.stat().st_mode & 0o777 == mode


def is_complete(out: Path, hosts: Sequence[str], root: Path | None = None) -> bool:
    """Returns True if all files are there, fit together, and are valid for `LEFT_ALONE` from now on."""
    if why_incomplete(out, hosts):
        return False
    return root is None or all(
        _is_copy(out / name, root / role / name, mode) for role in ROLES for name, mode in _files_of(role).items()
    )


def why_incomplete(out: Path, hosts: Sequence[str]) -> str:
    """Returns what is missing in the folder (but for ca.key), does not fit, or ends within `LEFT_ALONE`; else
    nothing.
    """
    now = dt.datetime.now(dt.UTC)
    try:
        authority = _certificate(out / "ca.pem")
        pairs = {name: (_certificate(out / f"{name}.pem"), _key(out / f"{name}.key")) for name in (*SERVERS, *CLIENTS)}
    except ValueError as error:
        return str(error)
    for name, (certificate, key) in pairs.items():
        if key.public_key() != certificate.public_key():
            return f"{name}.key is not the key of {name}.pem"
        if not _is_issued_by(certificate, authority):
            return f"{name}.pem is not signed by the authority in ca.pem"
        if name in SERVERS and not _is_for(certificate, _names(name, hosts)):
            return f"{name}.pem does not name all hosts"
    for name, cert in {"ca": authority, **{name: certificate for name, (certificate, _) in pairs.items()}}.items():
        if not cert.not_valid_before_utc <= now <= cert.not_valid_after_utc - LEFT_ALONE:
            return f"{name}.pem is not valid yet, or not for another {LEFT_ALONE.days} days"
    return ""


def _certificate(file: Path) -> x509.Certificate:
    """Returns the first certificate in a file; ValueError if there is none, or no file."""
    try:
        return x509.load_pem_x509_certificate(_content(file))
    except ValueError as error:
        raise ValueError(f"{file.name} is missing, or holds no PEM certificate") from error


def _key(file: Path) -> ec.EllipticCurvePrivateKey:
    """Returns the private key in a file; ValueError if there is no usable key, or no file."""
    try:
        key = serialization.load_pem_private_key(_content(file), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{file.name} is missing, or holds no PEM key without passphrase") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{file.name} is not a key on an elliptic curve")
    return key


def _is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _is_for(certificate: x509.Certificate, hosts: Iterable[str]) -> bool:
    kind = x509.SubjectAlternativeName
    names = [
        name for extension in certificate.extensions if isinstance(extension.value, kind) for name in extension.value
    ]
    return all(_general_name(host) in names for host in hosts)


def make_authority(now: dt.datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Returns a self-signed authority, valid for `CA_DAYS`, and its key."""
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
    """Returns a certificate of a role and its key: with hosts a server's, which cannot call anybody; else a
    client's.
    """
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
    """Returns the authority in a folder and its key; ValueError if they cannot be used."""
    if not (out / "ca.key").exists():
        raise ValueError(f"{out / 'ca.key'} is missing: bring it back, or make a new authority with --new-ca")
    try:
        certificate = _certificate(out / "ca.pem")
        key = _key(out / "ca.key")
    except ValueError as error:
        raise ValueError(f"{out}: {error}: bring it back, or make a new authority with --new-ca") from error
    if key.public_key() != certificate.public_key():
        raise ValueError(f"{out / 'ca.key'} is not the key of {out / 'ca.pem'}")
    return certificate, key


def write_pair(stem: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    """Writes <stem>.key, then <stem>.pem, each in one step; nobody else can read the key at any moment."""
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _replace(stem.with_suffix(".key"), pem, _SECRET)
    _replace(stem.with_suffix(".pem"), certificate.public_bytes(serialization.Encoding.PEM), _PUBLIC)


def _content(file: Path) -> bytes:
    """Returns the content of a file; empty if there is no such file."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Replaces a file: also after a crash there is the old file or the whole new one. An OSError names `path`."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        _give_to_owner_of_folder(temporary)
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)  # another call may make it at the same time
        _give_to_owner_of_folder(folder)


def _give_to_owner_of_folder(path: Path) -> None:
    """Gives a file that root writes to the owner of its folder, who must be able to read it."""
    if os.geteuid() == 0:
        owner = path.parent.stat()
        os.chown(path, owner.st_uid, owner.st_gid)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Waits until no other call works on the folder."""
    with (out / ".lock").open("w") as file:
        _give_to_owner_of_folder(out / ".lock")
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sentence(error: OSError) -> str:
    where = Path(str(error.filename or "."))
    sentence = f"cannot use {where}: {error.strerror}"
    for path in (where, *where.parents) if isinstance(error, PermissionError) else ():
        with suppress(OSError):
            owner = path.stat().st_uid
            user = os.geteuid()
            because = f"; {path} belongs to user {owner}, this process runs as user {user}" if owner != user else ""
            return sentence + because
    return sentence


if __name__ == "__main__":
    sys.exit(main())
