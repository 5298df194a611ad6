"""The services that are fuzzed: every real role on one rank with a tiny model; the critic also hosts frozen models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from services.engine.exchange import Publisher
from tests.fuzz.commands import MAX_RESPONSE_LENGTH, TEACHER_TOP_K, Role
from tests.integration.runtime.client import Client
from tests.integration.runtime.conftest import token_only
from tests.support import models
from tests.support.engines import CPU, make_engine, silent
from tests.support.groups import Group

COMMITTED = 2
# Small bounds, so that they are met.
BOUNDS = {"max_batch_bytes": 1 << 20, "max_held_bytes": 4 << 20, "max_send_s": 0.5}


@dataclass(frozen=True)
class Service:
    """A running group of one rank, and a client that has introduced itself.

    `manifest_sha256` is that of the version COMMITTED, if the group samples with published weights.
    """

    role: Role
    group: Group
    client: Client
    manifest_sha256: str = ""

    @property
    def trains(self) -> bool:
        return self.role in ("actor", "critic")

    @property
    def run_dir(self) -> Path:
        return self.group.run_dir


@contextmanager
def running(role: Role, folder: Path) -> Iterator[Service]:
    """Starts a service in a folder of its own, and ends it; it asks for a token."""
    policy, value = models.save_policy(folder / "policy"), models.save_value_model(folder / "value")
    run_dir = folder / "run"
    run_dir.mkdir()
    tree = {
        "run": {"dir": str(run_dir), "total_steps": 3},
        "data": {"train_files": "unused", "train_batch_size": 4, "max_response_length": MAX_RESPONSE_LENGTH},
        "algorithm": {"use_kl_in_reward": True},
        "placement": {"reward_model": "reward"} if role == "reward" else {"reference": "auto"},
        "reward_model": {"model": str(models.save_reward_model(folder / "reward"))},
        "actor": {"model": str(policy), "ppo_mini_batch_size": 1},
        "critic": {"model": str(value), "ppo_mini_batch_size": 1},
        "services": {**BOUNDS, "security": token_only(folder)},
    }
    if role in ("critic", "reward"):
        second = models.save_policy(folder / "second", seed=1, hidden_size=16)
        teachers = {"model": str(policy), "models": {"a": str(second)}}
        tree["teacher"] = {**teachers, "signal": "top_k", "top_k": TEACHER_TOP_K}
        tree["placement"]["teacher"] = role
    manifest_sha256 = ""
    if role == "rollout":
        tree["services"]["rollout"] = {}
        engine = make_engine(policy)
        publisher = Publisher(run_dir / "weights", engine.model, engine.whole_weights, torch.float32, CPU)
        manifest_sha256 = publisher.publish("run", COMMITTED, 0, silent)
    elif role != "reward":
        tree["placement"]["reference"] = role
    config_file = folder / "config.yaml"
    config_file.write_text(yaml.safe_dump(tree))
    group = Group(f"services.{role}", config_file, run_dir, role)
    try:
        group.wait_ready()
        client = Client(group.address, config_file, role=role)
        try:
            client.handshake()
            yield Service(role, group, client, manifest_sha256)
        finally:
            client.close()
    finally:
        group.stop()
