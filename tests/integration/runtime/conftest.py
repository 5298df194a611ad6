"""Toy groups, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from splitppo.rpc.secret_files import write_secret
from tests.integration.runtime.client import Client
from tests.support.certificates import TOKEN
from tests.support.groups import Group

MODULE = "tests.integration.runtime.toy"


Failpoints = Mapping[str, Sequence[Mapping[str, object]]]


def write_config(
    run_dir: Path, num_processes: int = 1, *, failpoints: Failpoints | None = None, **services: object
) -> Path:
    """A configuration for a toy critic."""
    tree = {
        "run": {"dir": str(run_dir), "total_steps": 3},
        "data": {"train_files": "unused", "train_batch_size": 4},
        "actor": {"model": "unused"},
        "services": {"critic": {"num_processes": num_processes}, **services},
        "debug": {"failpoints": failpoints or {}},
    }
    file = run_dir / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def token_only(folder: Path) -> dict[str, str]:
    """The section services.security of a service that asks for a token."""
    file = folder / "token"
    write_secret(file, TOKEN)
    return {"token_file": str(file)}


@dataclass
class Toy:
    """A running toy group, and a client that has introduced itself."""

    group: Group
    client: Client
    config_file: Path

    @property
    def run_dir(self) -> Path:
        return self.group.run_dir

    def another_client(self, epoch: int) -> Client:
        return Client(self.group.address, self.config_file, epoch=epoch)


StartToy = Callable[..., Toy]


def toys(tmp_path: Path) -> Iterator[StartToy]:
    started: list[Toy] = []

    def start(
        num_processes: int = 1,
        *,
        lifeline: bool = False,
        failpoints: Failpoints | None = None,
        **services: object,
    ) -> Toy:
        config_file = write_config(tmp_path, num_processes, failpoints=failpoints, **services)
        group = Group(
            MODULE, config_file, tmp_path, "critic", num_processes=num_processes, overrides=(), lifeline=lifeline
        )
        try:
            group.wait_ready()
        except BaseException:
            group.stop()
            raise
        toy = Toy(group, Client(group.address, config_file), config_file)
        started.append(toy)
        toy.client.handshake()
        return toy

    try:
        yield start
    finally:
        for toy in started:
            toy.client.close()
            toy.group.stop()


@pytest.fixture
def start_toy(tmp_path: Path) -> Iterator[StartToy]:
    yield from toys(tmp_path)


@pytest.fixture(scope="module")
def start_module_toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartToy]:
    yield from toys(tmp_path_factory.mktemp("run"))
