"""Certificate files at the start: a file that cannot be used is one sentence with file and reason."""

from __future__ import annotations

import datetime as dt
import logging
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from splitppo.config import ConfigError
from splitppo.rpc.certificates import Identity, check_names, load_identity
from tests.support.certificates import expire, postpone
from tools import certs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    certs.write_all(tmp_path / "certs", ["localhost"], days=90)
    return tmp_path / "certs"


def load(folder: Path, role: str = "actor", *, ca: str = "ca.pem", key: str | None = None) -> Identity:
    return load_identity(folder / ca, folder / f"{role}.pem", folder / (key or f"{role}.key"))


def refusal(*args: object, **kwargs: object) -> str:
    with pytest.raises(ConfigError) as refused:
        load(*args, **kwargs)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("role", ["actor", "critic", "reward", "rollout", "controller", "health"])
def test_what_the_tool_makes_can_be_used(folder: Path, role: str, caplog: pytest.LogCaptureFixture) -> None:
    load(folder, role)
    assert caplog.records == []


def test_an_identity_does_not_show_its_key(folder: Path) -> None:
    assert "PRIVATE" not in repr(load(folder))


def test_an_expired_certificate_says_which_and_since_when(folder: Path) -> None:
    expire(folder, "actor", days_ago=3)
    since = dt.datetime.now(dt.UTC) - dt.timedelta(days=3)
    sentence = refusal(folder)
    assert f"cert_file: the certificate in {folder / 'actor.pem'} has expired" in sentence
    assert f"valid until {since:%Y-%m-%d}" in sentence


def test_a_certificate_that_begins_later_says_when(folder: Path) -> None:
    postpone(folder, "actor")
    assert f"the certificate in {folder / 'actor.pem'} is not valid yet: it begins at" in refusal(folder)


def test_an_expired_authority_is_named(folder: Path) -> None:
    long_ago = dt.datetime.now(dt.UTC) - dt.timedelta(days=2 * certs.CA_DAYS)
    authority, key = certs.make_authority(long_ago)
    certs.write_pair(folder / "ca", authority, key)
    now = dt.datetime.now(dt.UTC)
    made = certs.make_certificate("actor", authority, key, now, now + dt.timedelta(days=30), hosts=["localhost"])
    certs.write_pair(folder / "actor", *made)
    assert f"ca_file: the certificate in {folder / 'ca.pem'} has expired" in refusal(folder)


def test_a_certificate_that_ends_soon_is_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    certs.write_all(folder, ["localhost"], days=5)
    load(folder)
    [record] = caplog.records
    assert "expires at" in record.getMessage()


def test_a_key_of_another_certificate_is_refused(folder: Path) -> None:
    sentence = refusal(folder, key="critic.key")
    assert sentence == (
        f"services.security.key_file: {folder / 'critic.key'} is not the key of the certificate in"
        f" {folder / 'actor.pem'}"
    )


def test_a_certificate_of_another_authority_is_refused(folder: Path, tmp_path: Path) -> None:
    certs.write_all(tmp_path / "other", ["localhost"], days=90)
    (folder / "other.pem").write_bytes((tmp_path / "other" / "ca.pem").read_bytes())
    assert "is not signed by any authority in" in refusal(folder, ca="other.pem")


def test_files_that_are_missing_or_something_else_are_named(folder: Path) -> None:
    assert "ca_file: cannot read" in refusal(folder, ca="nowhere.pem")
    (folder / "empty.pem").write_text("no certificate")
    assert "holds no usable PEM certificate" in refusal(folder, ca="empty.pem")
    assert "holds no usable PEM private key" in refusal(folder, key="actor.pem")


def test_a_key_with_a_passphrase_is_refused(folder: Path) -> None:
    key = serialization.load_pem_private_key((folder / "actor.key").read_bytes(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    (folder / "actor.key").write_bytes(encrypted)
    assert "is encrypted, expected a key without passphrase" in refusal(folder)


def test_a_key_that_others_can_read_is_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "actor.key").chmod(0o644)
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "others can read" in caplog.text
    assert "0644" in caplog.text


@pytest.mark.parametrize("host", ["one", "ONE", "10.0.0.5", "actor", "localhost"])
def test_a_servers_certificate_is_for_the_hosts_it_was_made_for(tmp_path: Path, host: str) -> None:
    certs.write_all(tmp_path, ["one", "10.0.0.5"], days=90)
    check_names(load(tmp_path), host, key="services.actor.address", cert_file=tmp_path / "actor.pem")


@pytest.mark.parametrize("host", ["two", "10.0.0.6"])
def test_a_servers_certificate_that_is_for_other_hosts_is_refused(tmp_path: Path, host: str) -> None:
    certs.write_all(tmp_path, ["one", "10.0.0.5"], days=90)
    with pytest.raises(ConfigError) as refused:
        check_names(load(tmp_path), host, key="services.actor.address", cert_file=tmp_path / "actor.pem")
    assert str(refused.value) == (
        f"services.security.cert_file: the certificate in {tmp_path / 'actor.pem'} is for actor, one, localhost,"
        f" 10.0.0.5, 127.0.0.1, and services.actor.address calls this one {host}: make one for {host}, as make certs"
        f" HOSTS={host} does"
    )
