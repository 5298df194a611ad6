"""Damage to any file of a real pair of checkpoints is found before any weight is changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from controller.run.checkpoint_store import CheckpointStore
from services.actor.role import ActorRole
from services.critic.role import CriticRole
from services.engine import export
from services.runtime.context import RankContext
from services.runtime.ranks.checkpoint_commands import CheckpointCommands
from services.runtime.role import Role
from services.runtime.state.command_call import StoredReply
from services.runtime.state.ledger import Ledger
from splitppo.config.load import validate
from splitppo.manifest import DamagedCheckpoint
from splitppo.rpc.errors import DataLoss
from splitppo.v1 import worker_pb2
from tests.support.checkpoints import DAMAGES, flip, remove
from tests.support.models import save_policy

pytestmark = pytest.mark.slow

OF_THE_PAIR = ["COMMITTED", "controller.json"]
OF_A_PART = [
    ".metadata",
    "__0_0.distcp",
    "huggingface/config.json",
    "huggingface/generation_config.json",
    "huggingface/model.safetensors",
    "huggingface/tokenizer.json",
    "huggingface/tokenizer_config.json",
    "manifest.json",
]
FILES = [*OF_THE_PAIR, *(f"{role}/{name}" for role in ("actor", "critic") for name in OF_A_PART)]


class Roles:
    """Both roles as their services hold them, in one process, over the checkpoints of `run_dir`."""

    def __init__(self, model: Path, run_dir: Path) -> None:
        self.config = validate(
            {
                "run": {"dir": str(run_dir), "total_steps": 10},
                "data": {"train_files": "unused", "train_batch_size": 8, "max_response_length": 6},
                "actor": {"model": str(model)},
            },
            "test",
        )
        self.roles: dict[str, Role] = {
            "actor": ActorRole(self._context("actor")),
            "critic": CriticRole(self._context("critic")),
        }

    def _context(self, role_name: Any, run_dir: Path | None = None) -> RankContext:
        config = self.config
        if run_dir is not None:
            config = config.model_copy(update={"run": config.run.model_copy(update={"dir": run_dir})})
        return RankContext(role_name, 0, 1, torch.device("cpu"), cast(Any, None), config)

    def commands(self, run_dir: Path, ledger: Ledger | None = None) -> dict[str, dict[str, Any]]:
        """The runtime's commands by role and method, over another run folder."""
        found = {}
        for name, role in self.roles.items():
            commands_of = CheckpointCommands(role, self._context(name, run_dir), ledger or Ledger())
            found[name] = {command.method: command for command in commands_of.commands()}
        return found

    def save(self, run_dir: Path, step: int) -> dict[str, str]:
        """Saves both parts; the sha256 of their manifests."""
        header = worker_pb2.CommandHeader(base_step=step)
        request = worker_pb2.SaveCheckpointRequest(header=header, with_hf_model=True)
        ledger, manifests = Ledger(), {}
        ledger.commit(step, "an update", StoredReply("", worker_pb2.CommandResult()))
        for role, commands in self.commands(run_dir, ledger).items():
            command = commands["SaveCheckpoint"]
            command.check(request)
            manifests[role] = command.run(request, None, None).durable.result(60)
        return manifests

    def check(self, run_dir: Path, step: int) -> None:
        """Makes the checks of both services before they load."""
        for commands in self.commands(run_dir).values():
            commands["LoadCheckpoint"].check(worker_pb2.LoadCheckpointRequest(step=step))

    def load(self, run_dir: Path, step: int) -> dict[str, str]:
        """Loads both parts, which answer the sha256 of the weights afterwards."""
        request = worker_pb2.LoadCheckpointRequest(step=step)
        commands = self.commands(run_dir).items()
        answers = {role: entry["LoadCheckpoint"].run(request, None, None).weights_sha256 for role, entry in commands}
        assert answers == {role: self.roles[role].compute_weights_digest() for role in self.roles}
        return answers


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Roles:
    folder = tmp_path_factory.mktemp("roles")
    return Roles(save_policy(folder / "policy"), folder / "run")


@pytest.fixture(scope="module")
def saved(roles: Roles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the pairs of steps 1 and 2, whose weights differ."""
    run_dir = roles.config.run.dir
    store = CheckpointStore(run_dir / "checkpoints")
    trained = Roles(save_policy(tmp_path_factory.mktemp("trained") / "policy", seed=1), run_dir)
    for step, at_step in ((1, roles), (2, trained)):
        store.commit(step, {"step": step}, {}, manifests=at_step.save(run_dir, step), keep=2)
    return run_dir


@pytest.fixture
def run_dir(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage; whole files are shared with the others."""
    return shutil.copytree(saved, tmp_path / "run", copy_function=lambda a, b: Path(b).hardlink_to(a))


def newest_loadable(roles: Roles, run_dir: Path, store: CheckpointStore) -> tuple[int, str]:
    """The step that the controller would ask for and the services would load, and what was found on the way."""
    found = ""
    while step := store.latest_step():
        try:
            store.check(step)
            roles.check(run_dir, step)
        except (DamagedCheckpoint, DataLoss) as error:
            found += str(error)
            store.set_aside(step, DamagedCheckpoint(str(error)))
        else:
            break
    return step, found


def test_these_are_all_files_of_a_pair(saved: Path) -> None:
    for step in (1, 2):
        folder = saved / "checkpoints" / f"global_step_{step}"
        assert sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()) == sorted(FILES)


def weights_of(run_dir: Path, step: int) -> dict[str, str]:
    """Returns the sha256 of the weights in the manifests of a whole pair, by role."""
    manifests = CheckpointStore(run_dir / "checkpoints").check(step)
    return {role: manifest.weights_sha256 for role, manifest in manifests.items()}


def test_a_whole_pair_gives_the_weights_that_its_manifests_name(roles: Roles, run_dir: Path) -> None:
    assert set(weights_of(run_dir, 1).values()).isdisjoint(weights_of(run_dir, 2).values())
    for step in (1, 2):
        roles.check(run_dir, step)
        assert roles.load(run_dir, step) == weights_of(run_dir, step)


def test_a_damaged_part_is_not_exported(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = run_dir / "checkpoints" / "global_step_2" / "actor"
    assert export.main(["--checkpoint", str(part), "--output", str(tmp_path / "whole")]) == 0
    flip(part / "__0_0.distcp")
    assert export.main(["--checkpoint", str(part), "--output", str(tmp_path / "damaged")]) == 2
    assert f"{part / '__0_0.distcp'}: expected sha256" in capsys.readouterr().err
    assert not (tmp_path / "damaged").exists()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_damage_to_any_file_is_named_and_leaves_the_pair_before(
    roles: Roles, run_dir: Path, file: str, damage: Callable[[Path], None]
) -> None:
    store = CheckpointStore(run_dir / "checkpoints")
    expected = weights_of(run_dir, 1)
    roles.load(run_dir, 2)
    damage(store.folder(2) / file)
    step, found = newest_loadable(roles, run_dir, store)
    assert step == 1
    if (file, damage) != ("COMMITTED", remove):  # which makes it half a pair
        assert f"global_step_2/{file}: " in found
    assert roles.load(run_dir, 1) == expected
