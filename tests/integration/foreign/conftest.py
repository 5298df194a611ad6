"""A real actor with a token, a real critic with TLS and a token, and an environment without SplitPPO."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.certificates import TOKEN, secure
from tests.support.groups import PROJECT, Group
from tests.support.models import save_policy

# What the foreign client imports, and what that needs.
FOREIGN = ("grpcio", "numpy", "protobuf", "typing_extensions", "xxhash")


@dataclass
class Foreigners:
    """Both workers, for clients without SplitPPO.

    Attributes:
        certificates: ca.pem, controller.pem and .key, token; the actor asks for the token alone.
        config: the actor's.
    """

    actor: Group
    critic: Group
    certificates: Path
    config: dict[str, Any]

    def settings(self, role: str) -> dict[str, str]:
        """Returns the settings with which the client of ppo_step.py reaches a worker."""
        if role == "actor":
            return {"address": self.actor.address, "token": TOKEN}
        files = {"ca": "ca.pem", "cert": "controller.pem", "key": "controller.key"}
        paths = {name: str(self.certificates / file) for name, file in files.items()}
        return {"address": self.critic.address, "token": TOKEN, **paths}


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Foreigners]:
    run_dir, certificates = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("certs")
    model = save_policy(tmp_path_factory.mktemp("models") / "policy")
    with_tls = secure(certificates)
    sections = {"actor": {"token_file": with_tls["token_file"]}, "critic": with_tls}
    configs = {role: config_of(run_dir, model, security) for role, security in sections.items()}
    groups: list[Group] = []
    try:
        for role, config in configs.items():
            file = run_dir / f"{role}.yaml"
            file.write_text(yaml.safe_dump(config))
            groups.append(Group(f"services.{role}", file, run_dir, role))
        yield Foreigners(*(group.wait_ready() for group in groups), certificates, configs["actor"])
    finally:
        for group in groups:
            group.stop()


def config_of(run_dir: Path, model: Path, security: dict[str, Any]) -> dict[str, Any]:
    return {
        "run": {"dir": str(run_dir), "total_steps": 2},
        "data": {"train_files": "unused", "train_batch_size": 4, "max_response_length": 8},
        "rollout": {"n": 2},
        "actor": {"model": str(model), "lr": 1e-3, "ppo_mini_batch_size": 4, "use_kl_loss": True},
        "critic": {"lr": 1e-3, "ppo_mini_batch_size": 4},
        "services": {"launch": "external", "security": security},
    }


@pytest.fixture(scope="module")
def foreign_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with FOREIGN alone, in the versions of ours, whose files it links to."""
    folder = tmp_path_factory.mktemp("foreign") / "venv"
    venv.create(folder, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for name in FOREIGN:
        files = distribution(name).files
        assert files
        for file in files:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                link = site_packages / file
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.locate())
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with the stubs that protoc makes of proto/."""
    out = tmp_path_factory.mktemp("stubs")
    subprocess.run([sys.executable, str(PROJECT / "tools" / "stubs.py"), "--out", str(out)], check=True)
    return out
