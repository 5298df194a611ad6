"""The tool that makes certificates: files that it writes, keeps and completes."""

from __future__ import annotations

import datetime as dt
import itertools
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509

from splitppo.rpc.bearer_tokens import BearerTokens
from splitppo.rpc.certificates import load_identity
from tests.support.certificates import expire, postpone
from tools import certs

pytestmark = pytest.mark.slow

ROLES = ("actor", "critic", "reward", "rollout", "controller")
NAMES = (*ROLES, "health")
# In the order in which they are written.
FILES = ("ca.key", "ca.pem", *(f"{name}.{kind}" for name in NAMES for kind in ("key", "pem")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    certs.write_all(tmp_path / "certs", ["localhost"], days=90)
    return tmp_path / "certs"


def run(folder: Path, *arguments: str) -> int:
    return certs.main(["--out", str(folder), "--hosts", "localhost", *arguments])


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.suffix in (".pem", ".key")
    }


def assert_usable(folder: Path, *names: str) -> None:
    for name in names:
        load_identity(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")


def test_the_tool_keeps_the_authority_unless_told_otherwise(folder: Path) -> None:
    before = (folder / "ca.pem").read_bytes(), (folder / "actor.pem").read_bytes()
    certs.write_all(folder, ["localhost"], days=90)
    after = (folder / "ca.pem").read_bytes(), (folder / "actor.pem").read_bytes()
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)
    certs.write_all(folder, ["localhost"], days=90, new_ca=True)
    assert (folder / "ca.pem").read_bytes() != before[0]


def test_only_the_owner_can_read_the_keys(folder: Path) -> None:
    assert {file.name: file.stat().st_mode & 0o777 for file in folder.glob("*.key")} == {
        f"{name}.key": 0o600 for name in ("ca", *NAMES)
    }


def test_an_authority_without_its_key_is_a_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ca.key").unlink()
    assert certs.main(["--out", str(folder)]) == 2
    assert f"error: {folder / 'ca.key'} is missing" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["actor", "critic", "reward", "rollout"])
def test_a_server_may_be_called_by_its_role_its_hosts_and_on_its_own_machine(tmp_path: Path, role: str) -> None:
    certs.write_all(tmp_path, ["gpu-one", "10.0.0.5", "localhost"], days=90)
    certificate = x509.load_pem_x509_certificate((tmp_path / f"{role}.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [role, "gpu-one", "localhost"]
    assert list(map(str, names.get_values_for_type(x509.IPAddress))) == ["10.0.0.5", "127.0.0.1"]


def test_certificates_do_not_outlive_their_authority(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(folder)
    assert run(folder, "--days", str(certs.CA_DAYS)) == 2
    assert f"error: the authority in {folder / 'ca.pem'} ends at" in capsys.readouterr().err
    assert contents(folder) == before


@pytest.mark.parametrize("arguments", [["--days", "0"], ["--days", "3651"], ["--hosts", ","]])
def test_arguments_that_make_no_sense_are_a_sentence(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert certs.main(["--out", str(tmp_path / "certs"), *arguments]) == 2
    assert capsys.readouterr().err == "error: --hosts needs at least one name or address, --days 1 to 3650\n"
    assert not (tmp_path / "certs").exists()


# --once


def test_what_is_complete_and_valid_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ca.key").unlink()  # elsewhere, as it should be
    before = contents(folder)
    assert run(folder, "--once") == 0
    assert contents(folder) == before
    until = dt.datetime.now(dt.UTC) + dt.timedelta(days=90)
    assert f"{folder}: complete and valid until {until:%Y-%m}" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["missing", "empty", "torn"])
def test_a_set_that_lacks_a_file_is_completed(folder: Path, how: str) -> None:
    authority = (folder / "ca.pem").read_bytes()
    for name in set(FILES) - {"ca.key", "ca.pem"}:
        file = folder / name
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2] if how == "torn" else b"")
        if how == "missing":
            file.unlink()
        assert run(folder, "--once") == 0
        assert_usable(folder, *NAMES)
        assert certs.is_complete(folder, ["localhost"])
    assert (folder / "ca.pem").read_bytes() == authority


@pytest.mark.parametrize("name", ["ca.key", "ca.pem"])
@pytest.mark.parametrize("content", ["", "something else"])
def test_an_authority_that_cannot_be_used_is_never_replaced_unasked(
    folder: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).write_text(content)
    (folder / "actor.key").unlink()  # so that there is something to do
    before = contents(folder)
    assert run(folder, "--once") == 2
    said = capsys.readouterr().err
    assert (f"{name} is missing, or holds no PEM" in said, said.count("\n")) == (True, 1)
    assert contents(folder) == before


@pytest.mark.parametrize("new_ca", [False, True], ids=["new pairs", "a new authority"])
def test_a_call_that_was_killed_after_any_file_is_completed(tmp_path: Path, folder: Path, new_ca: bool) -> None:
    old = contents(folder)
    certs.write_all(folder, ["localhost"], days=90, new_ca=new_ca)
    new = contents(folder)
    written = [name for name in FILES if new[name] != old[name]]
    assert len(written) == (14 if new_ca else 12)
    # Pairs of one authority fit together, whenever they were made.
    complete = {len(written)} if new_ca else set(range(0, len(written) + 1, 2))
    for num_written in range(len(written) + 1):
        state = {**old, **{name: new[name] for name in written[:num_written]}}
        if new_ca and num_written < 2:
            state.pop("ca.pem")  # goes before its key changes
        killed = tmp_path / f"killed-{num_written}"
        killed.mkdir()
        for name, content in state.items():
            (killed / name).write_bytes(content)
        assert certs.is_complete(killed, ["localhost"]) == (num_written in complete)
        assert run(killed, "--once") == 0
        assert_usable(killed, *NAMES)
        assert certs.is_complete(killed, ["localhost"])


@pytest.mark.parametrize(
    ("change", "because"),
    [
        pytest.param(lambda folder: expire(folder, "critic"), "critic.pem is not valid yet, or", id="expired"),
        pytest.param(lambda folder: postpone(folder, "health"), "health.pem is not valid yet, or", id="later"),
        pytest.param(
            lambda folder: certs.write_all(folder, ["localhost"], days=6), "another 7 days", id="ends in six days"
        ),
        pytest.param(lambda folder: certs.write_all(folder, ["other"], days=9), "does not name all hosts", id="hosts"),
        pytest.param(
            lambda folder: (folder / "actor.key").write_bytes((folder / "critic.key").read_bytes()),
            "actor.key is not the key of actor.pem",
            id="key",
        ),
    ],
)
def test_what_is_not_valid_for_another_week_is_made_anew(
    folder: Path, change: object, because: str, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = (folder / "ca.pem").read_bytes()
    hosts = ["--hosts", "localhost,gpu-one"] if because == "does not name all hosts" else []
    change(folder)  # type: ignore[operator]
    assert run(folder, "--once", *hosts) == 0
    assert because in capsys.readouterr().out
    assert certs.is_complete(folder, ["localhost"])
    assert (folder / "ca.pem").read_bytes() == authority


def test_calls_at_the_same_time_make_one_set(tmp_path: Path) -> None:
    folder, root = tmp_path / "certs", tmp_path / "roles"
    threads = [
        threading.Thread(target=certs.make, args=(folder, ["localhost"], 90, root), kwargs={"once": True})
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert certs.is_complete(folder, ["localhost"], root)


# --spread


def test_each_role_gets_what_its_processes_need_and_no_more(tmp_path: Path, folder: Path) -> None:
    root = tmp_path / "roles"
    assert run(folder, "--spread", str(root)) == 0
    assert sorted(entry.name for entry in root.iterdir()) == sorted(ROLES)
    for role in ROLES:
        modes = {file.name: file.stat().st_mode & 0o777 for file in (root / role).iterdir()}
        public = dict.fromkeys(("ca.pem", f"{role}.pem", "health.pem"), 0o644)
        assert modes == {**public, **dict.fromkeys((f"{role}.key", "health.key", "token"), 0o600)}
        assert (root / role).stat().st_mode & 0o777 == 0o700
        assert_usable(root / role, role, "health")
    [token] = {(root / role / "token").read_text() for role in ROLES}
    assert len(BearerTokens.parse(token, "test").accepted) == 1


def test_new_certificates_reach_every_role_and_the_token_stays(tmp_path: Path, folder: Path) -> None:
    root = tmp_path / "roles"
    run(folder, "--spread", str(root))
    token, actor = (root / "actor" / "token").read_bytes(), (root / "actor" / "actor.pem").read_bytes()
    assert run(folder, "--spread", str(root)) == 0
    assert (root / "actor" / "token").read_bytes() == token
    assert (root / "actor" / "actor.pem").read_bytes() != actor
    assert certs.is_complete(folder, ["localhost"], root)


def test_copies_that_are_missing_or_differ_are_completed_and_nothing_else(tmp_path: Path, folder: Path) -> None:
    root = tmp_path / "roles"
    run(folder, "--spread", str(root))
    before = contents(folder)
    changes = itertools.cycle([Path.unlink, lambda copy: copy.write_bytes(b"else"), lambda copy: copy.chmod(0o666)])
    for copy in sorted(file for file in root.rglob("*") if file.is_file()):
        next(changes)(copy)
        assert not certs.is_complete(folder, ["localhost"], root)
        assert run(folder, "--spread", str(root), "--once") == 0
        assert certs.is_complete(folder, ["localhost"], root)
    assert contents(folder) == before


@pytest.mark.parametrize("role", ["reward", "rollout"])
def test_what_an_earlier_version_made_without_a_group_is_completed(tmp_path: Path, folder: Path, role: str) -> None:
    root = tmp_path / "roles"
    run(folder, "--spread", str(root))
    authority, token = (folder / "ca.pem").read_bytes(), (folder / "token").read_bytes()
    for name in (f"{role}.pem", f"{role}.key"):
        (folder / name).unlink()
    shutil.rmtree(root / role)
    assert run(folder, "--spread", str(root), "--once") == 0
    assert certs.is_complete(folder, ["localhost"], root)
    assert ((folder / "ca.pem").read_bytes(), (root / role / "token").read_bytes()) == (authority, token)
    assert_usable(root / role, role, "health")


# Folders


def test_a_folder_that_is_none_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for arguments in (["--out", str(tmp_path / "file")], ["--out", str(tmp_path / "file" / "certs")]):
        assert certs.main(arguments) == 2
        said = capsys.readouterr().err
        assert (said.startswith(f"error: cannot use {tmp_path / 'file'}"), said.count("\n")) == (True, 1)


@contextmanager
def somebody_else(folder: Path) -> Iterator[None]:
    """The folder is not this process's to read."""
    if os.geteuid():
        folder.chmod(0)
        yield
        folder.chmod(0o700)
    else:
        os.seteuid(65534)
        yield
        os.seteuid(0)


@pytest.mark.parametrize("arguments", [[], ["--once"]])
def test_a_folder_of_somebody_else_is_a_sentence(
    folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with somebody_else(folder):
        code = run(folder, *arguments)
    said = capsys.readouterr().err
    assert (code, said.startswith(f"error: cannot use {folder}"), said.count("\n")) == (2, True, 1)
    assert "Permission denied" in said


def test_files_belong_to_whom_the_folder_belongs(tmp_path: Path) -> None:
    folder, root = tmp_path / "certs", tmp_path / "roles"
    for entry in (folder, root):
        entry.mkdir()
        if not os.geteuid():
            os.chown(entry, 65534, 65534)
    assert run(folder, "--spread", str(root)) == 0
    owners = {entry.stat().st_uid for made in (folder, root) for entry in made.rglob("*")}
    assert owners == {folder.stat().st_uid}
