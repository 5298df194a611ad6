"""The content of the compose files, read by Compose v2 and by docker-compose 1.29; no engine is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests.deployment.stack import FOLDER, GROUPS, PROFILES, SETTINGS, has_compose_v2, run_tool

pytestmark = pytest.mark.docker
NEEDED_GPUS = {"ACTOR_GPUS": "0,1,2", "CRITIC_GPUS": "6,7", "ACTOR_CPUS": "0-5", "CRITIC_CPUS": "6,7"}
GPUS = {**NEEDED_GPUS, "REWARD_GPUS": "3,4", "REWARD_CPUS": "4-7", "ROLLOUT_GPUS": "5", "ROLLOUT_CPUS": "8"}
ON_TOP: dict[str, dict[str, str]] = {
    "": {},
    "compose.code.yaml": {},
    "compose.gpu.yaml": GPUS,
    "compose.memory.yaml": {},
    "compose.secrets.yaml": {"SECRETS_DIR": "/srv/secrets"},
}


def config(
    on_top: str, settings: dict[str, str], command: tuple[str, ...], profiles: tuple[str, ...] = PROFILES
) -> subprocess.CompletedProcess[str]:
    """`... config` of compose.yaml with one more file, and settings on top of the example, which sets nothing."""
    files = [part for file in ("compose.yaml", on_top) if file for part in ("-f", file)]
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS} | settings
    chosen = [part for profile in profiles for part in ("--profile", profile)]
    return subprocess.run(
        [*command, "--env-file", ".env.example", *files, *chosen, "config"],
        cwd=FOLDER,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module", autouse=True)
def _docker_commands() -> None:
    """They come with the engine, on a machine that knows how to get one."""
    run_tool("docker-engine")


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, dict[str, Any]]]:
    """The services as Compose v2 understands them, by the file on top."""
    if not has_compose_v2():
        pytest.skip("no deployment here: there is no Docker Compose v2")
    found = {}
    for on_top, settings in ON_TOP.items():
        done = config(on_top, settings, ("docker", "compose"))
        assert done.returncode == 0, done.stderr
        found[on_top] = yaml.safe_load(done.stdout)["services"]
    return found


@pytest.mark.parametrize("profiles", [(), PROFILES], ids=["", "profiles"])
@pytest.mark.parametrize("on_top", ON_TOP)
def test_docker_compose_1_29_accepts_the_files(on_top: str, profiles: tuple[str, ...]) -> None:
    if shutil.which("docker-compose") is None:
        pytest.skip("no deployment here: there is no docker-compose 1.29")
    done = config(on_top, ON_TOP[on_top], ("docker-compose",), profiles)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("on_top", ON_TOP)
def test_without_their_profiles_a_reward_and_a_rollout_group_are_not_there_and_the_others_are_the_same(
    on_top: str, services: dict[str, dict[str, dict[str, Any]]]
) -> None:
    done = config(on_top, ON_TOP[on_top], ("docker", "compose"), ("tensorboard", "viewer"))
    assert done.returncode == 0, done.stderr
    others = {name: service for name, service in services[on_top].items() if name not in ("reward", "rollout")}
    assert yaml.safe_load(done.stdout)["services"] == others


def test_every_process_is_told_of_the_profiles_in_the_settings() -> None:
    if not has_compose_v2():
        pytest.skip("no deployment here: there is no Docker Compose v2")
    done = config("", {"COMPOSE_PROFILES": "reward,rollout"}, ("docker", "compose"), ())
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    for name in (*GROUPS, "controller", "prepare"):
        assert services[name]["environment"]["COMPOSE_PROFILES"] == "reward,rollout"


def test_the_weights_lie_in_memory_that_the_actor_writes_and_the_rollout_group_reads(
    services: dict[str, dict[str, dict[str, Any]]],
) -> None:
    of_files = services["compose.memory.yaml"]
    mounts_of = {name: service.get("volumes", []) for name, service in of_files.items()}
    weights = {name: mount for name, found in mounts_of.items() for mount in found if mount["target"] == "/weights"}
    assert {name: bool(mount.get("read_only")) for name, mount in weights.items()} == {"actor": False, "rollout": True}
    for name in (*GROUPS, "controller"):
        assert of_files[name]["environment"]["OVERRIDES"].split() == ["rollout.sync_dir=/weights"]


def test_gpus_of_groups_with_profiles_are_not_asked_for_without_these_profiles() -> None:
    if not has_compose_v2():
        pytest.skip("no deployment here: there is no Docker Compose v2")
    assert config("compose.gpu.yaml", NEEDED_GPUS, ("docker", "compose"), ()).returncode == 0


def test_nothing_runs_with_more_rights_than_it_needs(services: dict[str, dict[str, dict[str, Any]]]) -> None:
    for on_top, of_files in services.items():
        for name, service in of_files.items():
            assert (service["read_only"], service["init"], service["cap_drop"]) == (True, True, ["ALL"]), name
            may_sandbox = (on_top, name) == ("compose.code.yaml", "controller")
            more = ["seccomp:seccomp.code.json", "apparmor:unconfined"] if may_sandbox else []
            assert service["security_opt"] == ["no-new-privileges:true", *more], name
            assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", [])), name


def test_the_viewer_listens_on_this_machine_alone_and_only_reads(
    services: dict[str, dict[str, dict[str, Any]]],
) -> None:
    viewer = services[""]["viewer"]
    assert viewer["network_mode"] == "host"
    assert "--host" not in viewer["entrypoint"]
    assert [(mount["target"], mount["read_only"]) for mount in viewer["volumes"]] == [("/runs", True)]


def mounts(services: dict[str, dict[str, Any]]) -> set[tuple[str, str]]:
    """(service, volume or folder) of every mount."""
    return {(name, mount["source"]) for name, service in services.items() for mount in service.get("volumes", [])}


def test_a_role_sees_its_own_secrets_and_nobody_the_authoritys_key(
    services: dict[str, dict[str, dict[str, Any]]],
) -> None:
    secrets = {mount for mount in mounts(services[""]) if mount[1].startswith(("secrets-", "authority"))}
    roles = (*GROUPS, "controller")
    own = {(role, f"secrets-{role}") for role in roles}
    assert secrets == own | {("certs", "authority")} | {("certs", f"secrets-{role}") for role in roles}


def test_secrets_of_ones_own_take_the_place_of_those_that_are_made(
    services: dict[str, dict[str, dict[str, Any]]],
) -> None:
    of_files = services["compose.secrets.yaml"]
    assert of_files["certs"]["command"] == ["own-secrets"]
    for role in (*GROUPS, "controller"):
        (mount,) = [mount for mount in of_files[role]["volumes"] if mount["target"] == "/secrets"]
        assert (mount["source"], mount["read_only"]) == (f"/srv/secrets/{role}", True)


def test_each_group_gets_its_own_gpus_and_everybody_both_lists(services: dict[str, dict[str, dict[str, Any]]]) -> None:
    of_files = services["compose.gpu.yaml"]
    for role in GROUPS:
        (devices,) = of_files[role]["deploy"]["resources"]["reservations"]["devices"]
        assert ",".join(devices["device_ids"]) == GPUS[f"{role.upper()}_GPUS"]
        assert of_files[role]["image"].endswith("-vllm")
    for role in (*GROUPS, "controller", "prepare"):
        environment = of_files[role]["environment"]
        assert {name: environment[name] for name in GPUS if name.endswith("GPUS")} == {
            name: value for name, value in GPUS.items() if name.endswith("GPUS")
        }


@pytest.mark.parametrize("missing", NEEDED_GPUS)
def test_gpus_without_their_settings_are_refused_with_the_name_of_what_is_missing(missing: str) -> None:
    if not has_compose_v2():
        pytest.skip("no deployment here: there is no Docker Compose v2")
    settings = {name: value for name, value in NEEDED_GPUS.items() if name != missing}
    done = config("compose.gpu.yaml", settings, ("docker", "compose"))
    assert done.returncode != 0
    assert re.search(rf"\b{missing}\b.*: set it in \.env", done.stderr)
