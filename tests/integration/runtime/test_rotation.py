"""Tokens and certificates are replaced in a run: groups are started again, and the controller goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from splitppo.rpc.errors import Unauthenticated, Unavailable
from splitppo.rpc.secret_files import write_secret
from tests.integration.runtime.client import Client, experience, result
from tests.integration.runtime.conftest import MODULE, write_config
from tests.support.certificates import secure
from tests.support.groups import Group, free_address, wait_until
from tools import certs

OLD, NEW = "the-old-token-0123456789", "the-new-token-0123456789"


class Secured:
    """A toy behind TLS and a token, at an address that a restart keeps, and the files of its credentials."""

    def __init__(self, folder: Path) -> None:
        self.files, self._run_dir = folder / "certs", folder / "run"
        self._run_dir.mkdir()
        security = secure(self.files)
        self.write_tokens(OLD)
        self.address = free_address()
        self._config_file = write_config(self._run_dir, security=security, critic={"bind": self.address})
        self._group: Group | None = None
        self._clients: list[Client] = []

    def write_tokens(self, *tokens: str) -> None:
        write_secret(self.files / "token", "\n".join(tokens))

    def start(self) -> None:
        """Kills the group, if there is one, and starts it again, with the files as they are now."""
        if self._group is not None:
            self._group.kill_rank(0)
            self._group.wait_ended()
        self._group = Group(MODULE, self._config_file, self._run_dir, "critic")
        self._group.wait_ready()

    def client(self, epoch: int) -> Client:
        """A controller, which reads the files now, at its start, and never again."""
        self._clients.append(Client(self.address, self._config_file, epoch=epoch))
        return self._clients[-1]

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        if self._group is not None:
            self._group.stop()


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    secured = Secured(tmp_path)
    try:
        yield secured
    finally:
        secured.stop()


def go_on(client: Client, step: int) -> None:
    """Does as a controller whose group was started again: restores the step before, makes one more, saves."""
    wait_until(lambda: reaches(client), what="the controller reaches its group")
    client.handshake()
    if step > 1:
        assert result(client.load(step - 1, base_step=0)).committed_step == step - 1
    client.put(experience(step), prompts=[[1]], responses=[[1]], returns=[[0.5]])
    assert result(client.update(step)).committed_step == step
    result(client.save(step))


def reaches(client: Client) -> Any:
    """A channel that had lost its group waits a little before it connects again."""
    try:
        return client.status()
    except Unavailable:
        return None


def test_a_new_token_and_new_certificates_come_into_use_one_restart_after_the_other(secured: Secured) -> None:
    secured.start()
    first = secured.client(epoch=1)
    go_on(first, 1)

    secured.write_tokens(OLD, NEW)
    assert certs.main(["--out", str(secured.files)]) == 0  # new pairs of the same authority
    secured.start()
    go_on(first, 2)

    secured.write_tokens(NEW, OLD)
    second = secured.client(epoch=2)
    second.handshake()  # with the new token and certificate, while the old ones are still taken
    first.status()

    secured.write_tokens(NEW)
    secured.start()
    go_on(second, 3)
    with pytest.raises(Unauthenticated, match="wrong token"):
        first.status()


@pytest.mark.extended
def test_a_new_authority_comes_into_use_while_both_are_trusted(secured: Secured) -> None:
    ca_file = secured.files / "ca.pem"
    old_authority = ca_file.read_bytes()
    old_pairs = {
        file.name: file.read_bytes() for file in secured.files.glob("c*") if file.stem in ("critic", "controller")
    }
    assert certs.main(["--out", str(secured.files), "--new-ca"]) == 0
    new_authority = ca_file.read_bytes()
    new_pairs = {name: (secured.files / name).read_bytes() for name in old_pairs}

    def write(authorities: bytes, pairs: dict[str, bytes]) -> None:
        ca_file.write_bytes(authorities)
        for name, content in pairs.items():
            (secured.files / name).write_bytes(content)

    write(old_authority, old_pairs)
    trusts_old = secured.client(epoch=1)
    write(old_authority + new_authority, old_pairs)
    trusts_both = secured.client(epoch=1)
    secured.start()
    trusts_old.handshake()
    go_on(trusts_both, 1)

    write(old_authority + new_authority, new_pairs)
    secured.start()
    go_on(trusts_both, 2)
    with pytest.raises(Unavailable):
        trusts_old.status()

    write(new_authority, new_pairs)
    secured.start()
    trusts_new = secured.client(epoch=2)
    go_on(trusts_new, 3)
    with pytest.raises(Unavailable):
        trusts_both.status()
