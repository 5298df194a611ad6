"""The entry point of the containers: the commands that it runs, and the sentences of its refusals."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import processes
from deploy.checks import Refused
from deploy.compose.entrypoint import PORTS, command_of, gpus_of, main
from splitppo.config import Config, load_config
from tests.support.groups import PROJECT, wait_until

QUICKSTART = (PROJECT / "recipes" / "sort_letters" / "cpu.yaml").read_text()
USER = os.getuid() or 10001  # who runs the entry point where it may not do everything
ROLES = (*PORTS, "controller")
OWN = {"RECIPE": "../mine.yaml", "MODEL_DIR": "/srv/models", "DATA_DIR": "/srv/data"}
ROLLOUT = {"COMPOSE_PROFILES": "tensorboard,rollout"}


@pytest.fixture
def root() -> Iterator[Path]:
    """The volumes of a container, each as it should be.

    Every start of pytest takes others' rights to all that `tmp_path` lies in, and some tests are another user here.
    """
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder))
        yield Path(folder)


def fill(root: Path) -> None:
    for folder in ("runs", "cache", "prepared", "authority", "secrets", "spread"):
        (root / folder).mkdir()
    for folder in ("models", "data"):
        (root / folder / "sort_letters").mkdir(parents=True)
    for role in ROLES:
        (root / "spread" / role).mkdir()
    for name in ("ca", "health", *ROLES):
        (root / "secrets" / f"{name}.pem").touch()
        (root / "secrets" / f"{name}.key").touch()
    (root / "secrets" / "token").touch()
    (root / "recipe.yaml").write_text(QUICKSTART)


def config_of(role: str, root: Path, environment: dict[str, str]) -> Config:
    command = command_of(role, [], environment, root)
    assert command is not None
    config_file = command.index("--config") + 1
    return load_config(root / "recipe.yaml", command[config_file + 1 :])


def test_the_images_hold_all_that_both_entry_points_import_beside_the_standard_library(tmp_path: Path) -> None:
    dockerfile = (PROJECT / "Dockerfile").read_text()
    assert "\nCOPY splitppo /app/splitppo\n" in dockerfile
    (tmp_path / "splitppo").symlink_to(PROJECT / "splitppo")
    copied = re.findall(r"^COPY (deploy/.+\.py) /app/", dockerfile, re.MULTILINE)
    for file in (Path(name) for names in copied for name in names.split()):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PROJECT / file, tmp_path / file)
        assert f"!{file}\n" in (PROJECT / ".dockerignore").read_text()
    both = "deploy.compose.entrypoint, deploy.k8s.entrypoint"
    code = f"import sys; sys.path = [{str(tmp_path)!r}, *sys.path]; import {both}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize("role", ["actor", "critic", "reward", "controller"])
def test_the_quickstarts_recipe_is_placed_in_containers_and_nothing_else_of_it_changes(role: str, root: Path) -> None:
    config, plain = config_of(role, root, {}), load_config(root / "recipe.yaml")
    assert str(config.run.dir) == "/runs/quickstart"
    assert (config.services.launch, config.services.security.tls) == ("external", True)
    assert config.roles == plain.roles
    for name in ("actor", "critic", "reward"):
        service, in_recipe = (tree.services.of(name) for tree in (config, plain))  # type: ignore[arg-type]
        assert (service.bind, service.address) == (f"0.0.0.0:{PORTS[name]}", f"{name}:{PORTS[name]}")
        assert service.threads == in_recipe.threads
    assert config.actor.model == "/models/sort_letters/model"
    assert (config.actor.lr, config.run.total_steps) == (plain.actor.lr, plain.run.total_steps)


@pytest.mark.parametrize("role", ROLES)
def test_the_profile_rollout_gives_the_run_a_rollout_group_and_changes_nothing_else(role: str, root: Path) -> None:
    config, without = config_of(role, root, ROLLOUT), config_of("controller", root, {"COMPOSE_PROFILES": "reward"})
    assert config.services.rollout is not None
    assert (config.services.rollout.bind, config.services.rollout.address) == ("0.0.0.0:7004", "rollout:7004")
    services = config.services.model_copy(update={"rollout": None})
    assert config.model_copy(update={"services": services}) == without


def test_a_rollout_group_that_nobody_else_knows_is_refused(root: Path) -> None:
    with pytest.raises(Refused, match=r"^COMPOSE_PROFILES is 'reward', expected rollout in it: set it in \.env"):
        command_of("rollout", [], {"COMPOSE_PROFILES": "reward"}, root)


def test_a_recipe_of_ones_own_names_its_files_itself_and_overrides_come_last(root: Path) -> None:
    config = config_of("controller", root, {**OWN, "OVERRIDES": "run.seed=7 'run.name=two words' run.dir=/runs/x"})
    assert config.actor.model == ".cache/sort_letters/model"
    assert (config.run.seed, config.run.name, str(config.run.dir)) == (7, "two words", "/runs/x")


@pytest.mark.parametrize(
    ("environment", "folder"), [({}, "quickstart"), (OWN, "mine"), ({**OWN, "RUN": "again"}, "again")]
)
def test_a_run_is_called_after_the_recipe(environment: dict[str, str], folder: str, root: Path) -> None:
    assert str(config_of("critic", root, environment).run.dir) == f"/runs/{folder}"


def test_a_container_numbers_its_own_gpus_from_zero(root: Path) -> None:
    lists = {"ACTOR_GPUS": "0,1,5", "CRITIC_GPUS": "6,7"}
    for role, with_reward in (("critic", {}), ("reward", {"REWARD_GPUS": "2"})):
        services = config_of(role, root, {**lists, **with_reward}).services
        assert (services.actor.num_processes, services.actor.devices) == (3, (0, 1, 2))
        assert (services.critic.num_processes, services.critic.devices) == (2, (0, 1))
        assert services.reward.devices == ((0,) if with_reward else ())
    rollout = config_of("rollout", root, {**lists, **ROLLOUT, "ROLLOUT_GPUS": "2,3,4"}).services.of("rollout")
    assert (rollout.num_processes, rollout.devices) == (3, (0, 1, 2))


@pytest.mark.parametrize(("rollout", "takes_turns"), [("2,3", True), ("3,4", True), ("4,5", False)])
def test_a_rollout_group_on_gpus_of_the_critic_takes_turns_with_it(root: Path, rollout: str, takes_turns: bool) -> None:
    lists = {"ACTOR_GPUS": "0,1", "CRITIC_GPUS": "2,3", "ROLLOUT_GPUS": rollout}
    (root / "recipe.yaml").write_text(QUICKSTART.replace("launch: local", "allow_shared_devices: true"))
    for role in ("actor", "critic", "rollout", "controller"):
        config = config_of(role, root, {**lists, **ROLLOUT})
        assert config.rollout_shares_devices is takes_turns
    assert not config_of("actor", root, lists).rollout_shares_devices


@pytest.mark.parametrize(
    ("actor", "critic", "reward", "sentence"),
    [
        ("0,1", "1,2", "", "ACTOR_GPUS (0,1) and CRITIC_GPUS (1,2) overlap in 1: give each group its own GPUs"),
        ("0,1", "2", "1", "ACTOR_GPUS (0,1) and REWARD_GPUS (1) overlap in 1: give each group its own GPUs"),
        ("0", "2,3", "2,3", "CRITIC_GPUS (2,3) and REWARD_GPUS (2,3) overlap in 2,3: give each group its own GPUs"),
        ("0,1", "", "", "CRITIC_GPUS is not set, expected a list for each group, as in ACTOR_GPUS"),
        ("", "1", "2", "ACTOR_GPUS is not set, expected a list for each group, as in CRITIC_GPUS and REWARD_GPUS"),
        ("0,,1", "2", "", "ACTOR_GPUS is '0,,1', expected different GPUs with commas between, such as 0,1,2"),
        ("0", "1, 2", "", "CRITIC_GPUS is '1, 2', expected different GPUs with commas between, such as 0,1,2"),
        ("3,3", "1", "", "ACTOR_GPUS is '3,3', expected different GPUs with commas between, such as 0,1,2"),
    ],
)
@pytest.mark.parametrize("role", ["prepare", *ROLES])
def test_lists_of_gpus_that_make_no_sense_are_refused(
    role: str, actor: str, critic: str, reward: str, sentence: str
) -> None:
    with pytest.raises(Refused) as refused:
        gpus_of({"ACTOR_GPUS": actor, "CRITIC_GPUS": critic, "REWARD_GPUS": reward}, role)
    assert str(refused.value) == sentence


@pytest.mark.parametrize("group", ["reward", "rollout"])
def test_nobody_but_a_group_with_a_profile_itself_asks_for_its_gpus(group: str) -> None:
    lists = {"ACTOR_GPUS": "0", "CRITIC_GPUS": "1"}
    for role in ("actor", "critic", "controller", "prepare"):
        assert gpus_of(lists, role) == {"actor": ["0"], "critic": ["1"]}
    name = f"{group.upper()}_GPUS"
    with pytest.raises(Refused, match=rf"^{name} is not set, expected a list for each group, as in ACTOR_GPUS and"):
        gpus_of(lists, group)


@pytest.mark.parametrize(
    ("role", "gone", "environment", "facts"),
    [
        ("actor", "models/sort_letters", {}, ["/models", "prepare"]),
        ("controller", "data/sort_letters", {}, ["/data", "prepare"]),
        ("actor", "models/sort_letters", OWN, ["MODEL_DIR=/srv/models is empty", "/models"]),
        ("controller", "data/sort_letters", OWN, ["DATA_DIR=/srv/data is empty", "/data"]),
        ("actor", "secrets/actor.key", {}, ["/secrets/actor.key is missing", "certs", "SECRETS_DIR/actor"]),
        ("critic", "secrets/health.pem", {}, ["/secrets/health.pem is missing"]),
        ("reward", "secrets/reward.pem", {}, ["/secrets/reward.pem is missing", "SECRETS_DIR/reward"]),
        ("rollout", "secrets/rollout.pem", ROLLOUT, ["/secrets/rollout.pem is missing", "SECRETS_DIR/rollout"]),
        ("controller", "secrets/token", {}, ["/secrets/token is missing"]),
        ("actor", "recipe.yaml", OWN, ["RECIPE=../mine.yaml is no file"]),
        ("actor", "", {"DATA_DIR": "/srv/data"}, ["DATA_DIR is set and RECIPE is not"]),
        ("actor", "", {"RUN": "../elsewhere"}, ["RUN is '../elsewhere'", "the name of a folder"]),
    ],
)
def test_what_is_missing_is_named_with_where_it_should_come_from(
    role: str, gone: str, environment: dict[str, str], facts: list[str], root: Path
) -> None:
    if gone:
        (root / gone).rmdir() if (root / gone).is_dir() else (root / gone).unlink()
    with pytest.raises(Refused) as refused:
        command_of(role, [], environment, root)
    assert [fact for fact in facts if fact not in str(refused.value)] == []


def take_away(root: Path, path: str) -> None:
    """Makes everything uid 10001's, and one path root's alone; without root one path is nobody's."""
    if os.getuid():
        return (root / path).chmod(0)
    for entry in root.rglob("*"):
        os.chown(entry, 10001, 10001)
    os.chown(root / path, 0, 0)
    (root / path).chmod(0o700 if (root / path).is_dir() else 0o600)
    root.chmod(0o755)
    return None


def stderr_of_a_user(call: str, root: Path) -> str:
    """Returns the output of the entry point for a user without all rights."""
    code = f"""
import os
from pathlib import Path
from deploy.compose.entrypoint import command_of, main
os.getuid() or os.setuid({USER})
root = Path({str(root)!r})
{call}
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)
    return done.stderr


@pytest.mark.parametrize(
    ("role", "path", "facts"),
    [
        ("critic", "secrets/critic.key", ["cannot read", "critic.key (it", f"chown -R {USER} SECRETS_DIR/critic"]),
        ("critic", "secrets", ["cannot read", "ca.pem (/", f"chown -R {USER} SECRETS_DIR/critic"]),
        ("controller", "runs", ["cannot write to", "runs (it", f"chown -R {USER} RUNS_DIR"]),
        ("certs", "spread/actor", ["cannot write to", "spread/actor (it", "docker compose down -v"]),
        ("prepare", "prepared", ["cannot write to", "prepared (it", "docker compose down -v"]),
        ("actor", "models", ["cannot read", "models (it", "chmod -R a+rX MODEL_DIR"]),
        ("actor", "recipe.yaml", ["cannot read", "recipe.yaml (it", "chmod a+r RECIPE"]),
    ],
)
def test_what_belongs_to_somebody_else_is_named_with_both_uids(
    role: str, path: str, facts: list[str], root: Path
) -> None:
    take_away(root, path)
    error = stderr_of_a_user(f"main([{role!r}], {{}}, root)", root)
    assert [fact for fact in [*facts, f"uid {os.getuid()}", f"runs as uid {USER}"] if fact not in error] == [], error
    assert len(error.splitlines()) == 1


def test_a_file_among_others_that_cannot_be_read_is_a_warning(root: Path) -> None:
    (root / "models" / "tiny").mkdir()
    (root / "models" / "tiny" / "model.safetensors").touch()
    take_away(root, "models/tiny/model.safetensors")
    error = stderr_of_a_user(f"command_of('actor', [], {OWN}, root)", root)
    facts = [
        "warning: cannot read",
        f"model.safetensors (it belongs to uid {os.getuid()}, mode",
        "chmod -R a+rX MODEL_DIR",
    ]
    assert [fact for fact in facts if fact not in error] == [], error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("role", "code"), [("actor", 0), ("critic", 0), ("reward", 0), ("rollout", 0), ("controller", 2), ("prepare", 2)]
)
def test_refused_input_does_not_have_the_engine_start_a_group_again(
    role: str, code: int, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([role], {"ACTOR_GPUS": "0", "CRITIC_GPUS": "0", **ROLLOUT}, root) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ACTOR_GPUS (0) and CRITIC_GPUS (0) overlap")
    assert len(error.splitlines()) == 1


def test_with_a_recipe_of_ones_own_nothing_is_prepared(root: Path) -> None:
    assert command_of("prepare", [], OWN, root) is None
    assert command_of("prepare", [], {}, root) is not None


def test_a_role_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["actr"]) == 2
    assert "expected one of actor, critic, reward, rollout, controller" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("codes", "expected", "num_runs"), [([0], 0, 1), ([1], 1, 1), ([137, 0], 0, 2), ([137, 137, 2], 2, 3)]
)
def test_only_a_controller_that_was_killed_is_started_again(codes: list[int], expected: int, num_runs: int) -> None:
    left = list(codes)
    assert processes.run_controller(lambda: left.pop(0), pause_s=0.0) == expected
    assert len(codes) - len(left) == num_runs


def test_a_controller_that_is_always_killed_is_given_up() -> None:
    runs = []
    assert processes.run_controller(lambda: runs.append(1) or 137, pause_s=0.0) == 137
    assert len(runs) == 1 + processes.MAX_RESTARTS


def test_a_signal_is_handed_on_and_the_childs_exit_code_is_ours(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    # Short sleeps: Python looks for signals between them, and one that comes just before a sleep does not end it.
    child = (
        "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7));"
        f" pathlib.Path({str(ready)!r}).touch(); [time.sleep(0.05) for _ in range(1200)]"
    )
    code = f"import sys; from deploy.processes import Child; sys.exit(Child().run([sys.executable, '-c', {child!r}]))"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT)
    try:
        wait_until(ready.exists, 60.0, "the child")
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(60.0) == 7
    finally:
        parent.kill()
        parent.wait()
