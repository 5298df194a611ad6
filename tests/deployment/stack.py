"""Runs deploy/compose on a Docker engine as a user does, each time as a project of its own."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.groups import PROJECT, free_address
from tests.support.models import save_reward_model
from tests.support.runs import RunFolder

FOLDER = PROJECT / "deploy" / "compose"
# Programs that make an engine and a base image, on machines that have them.
TOOLS_VARIABLE = "SPLITPPO_TEST_TOOLS"
BASE_IMAGE = os.environ.get("BASE_IMAGE", "python:3.11-slim-bookworm")
ENGINE_TIMEOUT_S = 600.0
POLL_INTERVAL_S = 0.5
RUN_FILES = ("metrics.jsonl", "processes.json", "summary.json", "config.yaml", "checkpoints")
REWARD_GROUP = "reward_model.model=/models/reward_model placement.reward_model=reward"
GROUPS = ("actor", "critic", "reward", "rollout")
PROFILES = ("tensorboard", "viewer", "reward", "rollout")
ALL_PROFILES = tuple(part for profile in PROFILES for part in ("--profile", profile))
LABEL = "com.docker.compose.project"


def docker(*arguments: str, check: bool = True, timeout_s: float = ENGINE_TIMEOUT_S, **options: Any) -> str:
    """Returns the stdout of `docker ...`; fails with its stderr."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout_s, **options)
    assert not check or done.returncode == 0, f"docker {' '.join(arguments)}:\n{done.stderr}"
    return done.stdout.strip()


def missing_engine() -> str | None:
    """Why nothing can be deployed here; None where an engine answers. Starts one where this machine knows how."""
    run_tool("docker-engine")
    if shutil.which("docker") is None:
        return "there is no command docker"
    if subprocess.run(["docker", "info"], capture_output=True, timeout=60.0, check=False).returncode:
        return "no Docker engine answers"
    return missing_base_image() if has_compose_v2() else "there is no Docker Compose v2"


def run_tool(name: str, *arguments: str) -> None:
    """Runs a program of the folder that `SPLITPPO_TEST_TOOLS` names, if it is there."""
    folder = os.environ.get(TOOLS_VARIABLE, "")
    if folder and (tool := Path(folder, name)).is_file():
        subprocess.run([str(tool), *arguments], capture_output=True, timeout=ENGINE_TIMEOUT_S, check=False)


def has_compose_v2() -> bool:
    """Returns True if `docker compose` is installed."""
    command = ["docker", "compose", "version"]
    return (
        shutil.which("docker") is not None and not subprocess.run(command, capture_output=True, check=False).returncode
    )


def missing_base_image() -> str | None:
    """Why no image can be built here; None where the base image is there, was made, or was pulled."""
    run_tool("base-image", BASE_IMAGE)
    for command in (["docker", "image", "inspect", BASE_IMAGE], ["docker", "pull", "--quiet", BASE_IMAGE]):
        if subprocess.run(command, capture_output=True, timeout=ENGINE_TIMEOUT_S, check=False).returncode == 0:
            return None
    return f"the image {BASE_IMAGE} is not here and cannot be pulled"


class Stack:
    """One project of deploy/compose; what it leaves is its own, by its name.

    Args:
        folder: for copies of what lies in its volumes.
        environment: the settings of `.env`.
        files: compose files on top of compose.yaml.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None, files: tuple[str, ...] = ()) -> None:
        self.project = f"splitppo-test-{secrets.token_hex(4)}"
        self.addresses = {role: free_address() for role in GROUPS}
        self.folder = RunFolder(folder)
        ports = {f"{role.upper()}_PORT": address.rpartition(":")[2] for role, address in self.addresses.items()}
        inherited = {name: value for name, value in os.environ.items() if name not in SETTINGS}
        self.environment = {**inherited, "COMPOSE_PROJECT_NAME": self.project, **ports, **(environment or {})}
        # A `.env` of whoever runs the tests does not count; the example sets nothing.
        self._options = ["--env-file", ".env.example"]
        self._options += [part for file in ("compose.yaml", *files) for part in ("-f", file)]

    def compose(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`docker compose ...` in deploy/compose."""
        command = ["docker", "compose", *self._options, *arguments]
        done = subprocess.run(
            command, cwd=FOLDER, env=self.environment, capture_output=True, text=True, timeout=ENGINE_TIMEOUT_S
        )
        assert not check or done.returncode == 0, f"{' '.join(command)}:\n{done.stderr}\n{self.logs()}"
        return done

    def up(self) -> None:
        """Starts everything; returns when the controller has been started, which waits for healthy groups."""
        self.compose("up", "--detach", "--no-build")

    def logs(self, *services: str) -> str:
        """Returns the output of the containers."""
        command = ["docker", "compose", *self._options, "logs", "--no-color", "--no-log-prefix", *services]
        done = subprocess.run(command, cwd=FOLDER, env=self.environment, capture_output=True, text=True)
        return done.stdout

    def container(self, service: str) -> str:
        """The id of a service's container, running or not."""
        return self.compose("ps", "--all", "--quiet", service).stdout.strip()

    def state(self, service: str, field: str = ".State") -> Any:
        """Returns a field that the engine has of a container, e.g. `.State.ExitCode`."""
        return json.loads(docker("inspect", "--format", f"{{{{json {field}}}}}", self.container(service)))

    def run_python(self, service: str, code: str) -> str:
        """Runs a script inside a container, as its user."""
        return self.compose("exec", "-T", service, "python", "-c", code).stdout

    def copy(self, service: str, source: str, target: Path) -> Path:
        """Copies a file or folder out of a container, running or not."""
        docker("cp", f"{self.container(service)}:{source}", str(target))
        return target

    def add_reward_model(self, folder: Path) -> None:
        """Puts a tiny classifier where `REWARD_GROUP` looks for it; `folder` gets a copy."""
        for file in save_reward_model(folder / "reward_model").iterdir():
            file.chmod(0o644)  # safetensors saves for the owner alone
        self.compose("up", "--no-start", "--no-build", "prepare")
        docker("cp", str(folder / "reward_model"), f"{self.container('prepare')}:/prepared")

    def fetch_run(self, *names: str) -> RunFolder:
        """A copy of what the run folder holds now."""
        self.folder.path.mkdir(parents=True, exist_ok=True)
        container = self.container("controller")
        for name in names or RUN_FILES:
            source = f"/runs/{self.environment.get('RUN', 'quickstart')}/{name}"
            docker("cp", f"{container}:{source}", str(self.folder.path), check=False)
        return self.folder

    def wait_for_step(self, step: int) -> int:
        """Waits until a step of at least this number is recorded; returns the last one."""

        def last_step() -> int | None:
            steps = self.fetch_run("metrics.jsonl").steps
            if steps and steps[-1] >= step:
                return steps[-1]
            assert self.state("controller", ".State.Running"), f"the run ended before step {step}:\n{self.logs()}"
            return None

        return int(self.wait_for(last_step, f"step {step}"))

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """Polls, twice a second: every look costs the engine a process or two."""
        deadline = time.monotonic() + ENGINE_TIMEOUT_S
        while not (value := condition()):
            assert time.monotonic() < deadline, f"{what}: not within {ENGINE_TIMEOUT_S} s\n{self.logs()}"
            time.sleep(POLL_INTERVAL_S)
        return value

    def wait_controller(self) -> int:
        """Waits for the end of the controller's container; its exit code."""
        return int(docker("wait", self.container("controller")))

    def down(self) -> None:
        """Removes all that the project has made, volumes too."""
        self.compose(*ALL_PROFILES, "down", "--volumes", "--timeout", "5", check=False)

    def left(self) -> list[str]:
        """Names of what the engine still has of this project."""
        of_project = ("--filter", f"label={LABEL}={self.project}")
        return [
            *docker("ps", "--all", "--format", "{{.Names}}", *of_project).split(),
            *docker("volume", "ls", "--format", "{{.Name}}", *of_project).split(),
            *docker("network", "ls", "--format", "{{.Name}}", *of_project).split(),
        ]


# Of .env: those of whoever runs the tests do not count, nor what make has been told (LOCK=...).
SETTINGS = (
    *("LOCK", "SHM_SIZE", "TENSORBOARD_PORT", "VIEWER_PORT", "REVISION"),
    *("RECIPE", "MODEL_DIR", "DATA_DIR", "RUNS_DIR", "RUN", "OVERRIDES", "SECRETS_DIR", "VERSION"),
    *(f"{group}_{what}" for group in map(str.upper, GROUPS) for what in ("CPUS", "GPUS", "PORT")),
    *("COMPOSE_FILE", "COMPOSE_PROFILES"),
)
