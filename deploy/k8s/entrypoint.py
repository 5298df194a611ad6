"""The entry point of every pod of deploy/k8s: it checks what the pod was given, then runs its role.

    entrypoint.py actor|critic|reward|rollout|controller|prepare [key.path=value | --check ...]

It needs the standard library only, so that a mistake is reported at once. A group that ends is started again inside its
pod, until its input is refused or the run has ended; then the pod ends and its GPUs are free. Exit codes are those of
the role (docs/running.md). Code 2, and code 1 of a controller, end the Job; any other code is followed by a new pod.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path

from deploy.checks import EXIT_BAD_INPUT, Refused, check_role, check_secrets, number, run_name
from deploy.placement import PORTS, GroupPlace, overrides
from deploy.processes import RESTART_PAUSE_S, Child, module_of, run_role, say

ROLES = (*PORTS, "controller", "prepare")
QUICKSTART = "/app/recipes/sort_letters/cpu.yaml"
PREPARED = "storage/prepared/sort_letters"
# A cluster may have to make a node and load an image before the last pod starts; all other pods and the probes wait.
START_TIMEOUT_S = 1800.0
POLL_INTERVAL_S = 5.0


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Runs the pod's role (first argument: actor, controller, ...); returns the exit code.

    `root` is the folder of the volumes.
    """
    role, *more = arguments or [""]

    def run_to_its_end(role: str, child: Child, command: Sequence[str]) -> int:
        return run_group(role, child, command, RunsEnd(root / "storage/runs" / run_name(environment)))

    return run_role(role, lambda: command_of(role, more, environment, root), run_to_its_end)


def command_of(
    role: str, more: Sequence[str], environment: Mapping[str, str], root: Path = Path("/")
) -> list[str] | None:
    """Checks what the pod of a role was given; returns the role's command line, None if there is nothing to do.

    Raises:
        Refused: a setting, a secret or the claim cannot be used.
    """
    check_role(role, ROLES)
    places = places_of(environment)
    if role in PORTS and role not in places:
        raise Refused(f"{role.upper()}_NODES is 0, but this pod belongs to the {role} group")
    recipe = environment.get("RECIPE", "")
    if not recipe.startswith("/") or not (root / recipe.lstrip("/")).is_file():
        raise Refused(
            f"RECIPE is {recipe!r}, expected a file in the pod: /recipe/... of the ConfigMap, or /app/recipes/..."
        )
    if not os.access(root / "storage", os.W_OK | os.X_OK):
        remedy = f"let its folder belong to gid {os.getgid()}, or take a driver that heeds fsGroup"
        raise Refused(f"cannot write to the claim storage as uid {os.getuid()}: {remedy}")
    python = [sys.executable, "-m"]
    if role == "prepare":
        is_own = recipe != QUICKSTART
        return None if is_own else [*python, "recipes.sort_letters.prepare", "--output", f"/{PREPARED}", *more]
    source = f"the Secrets are {role}-tls, health-tls and token"
    check_secrets(root, role, source=source, remedy="the pod's fsGroup gives it to gid 10001")
    if recipe == QUICKSTART:
        wait_until_prepared(root / PREPARED)
    if role in places and places[role].num_nodes > 1:
        wait_for_name(places[role], environment)
    return [*python, module_of(role), "--config", recipe, *common_overrides(environment), *more]


def common_overrides(environment: Mapping[str, str]) -> list[str]:
    """Makes the configuration overrides of this deployment, which worker groups and controller apply to the recipe."""
    more = [f"services.start_timeout_s={START_TIMEOUT_S:g}"]
    if environment["RECIPE"] == QUICKSTART:
        more += [f"actor.model=/{PREPARED}/model"]
        more += [f"data.{part}_files=/{PREPARED}/{part}.parquet" for part in ("train", "val")]
    run_dir = f"/storage/runs/{run_name(environment)}"
    return overrides(run_dir, "/secrets", places_of(environment), environment, more)


def places_of(environment: Mapping[str, str]) -> dict[str, GroupPlace]:
    """Returns where each worker group runs; its host is the Service of the group's name.

    Raises:
        Refused: a setting that should be a number is not.
    """
    places = {}
    for role in PORTS:
        num_nodes, num_gpus = (number(environment, f"{role.upper()}_{what}") for what in ("NODES", "GPUS"))
        if num_nodes:
            places[role] = GroupPlace(role, num_nodes, num_gpus or None, f"{role}-0.{role}-nodes")
    return places


def wait_for_name(place: GroupPlace, environment: Mapping[str, str], timeout_s: float = START_TIMEOUT_S) -> None:
    """Waits until the host name of a worker group's first pod can be resolved, at most `timeout_s` seconds.

    In the first pod itself the name must resolve to the pod's own address, not to that of an earlier pod.

    Raises:
        Refused: the name does not resolve so in time.
    """
    own = {environment["POD_IP"]} if environment["JOB_COMPLETION_INDEX"] == "0" else set[str]()
    if not wait_until(lambda: bool(addresses := addresses_of(place.meeting)) and addresses >= own, timeout_s):
        actual = ", ".join(addresses_of(place.meeting)) or "unknown"
        expected = "".join(own) or "an address"
        raise Refused(
            f"{place.meeting} is {actual} after {timeout_s:g} s, expected {expected}: the Service of that name"
        )


def addresses_of(name: str) -> set[str]:
    """Resolves a host name to its IP addresses; empty if the name is unknown."""
    try:
        return {str(address[4][0]) for address in socket.getaddrinfo(name, None)}
    except OSError:
        return set()


def wait_until_prepared(folder: Path, timeout_s: float = START_TIMEOUT_S) -> None:
    """Waits for the folder that the Job prepare makes, which appears whole or not at all; Refused after `timeout_s`."""
    if not wait_until(folder.is_dir, timeout_s):
        raise Refused(f"{folder} is not there after {timeout_s:g} s: kubectl logs job/prepare")


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Polls a condition until it is true; returns False if that takes more than `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_INTERVAL_S)
    return True


class RunsEnd:
    """Tells, when called, whether a run has ended for good (completed or failed) since this object was made.

    The folder of the run then has a new summary.json that says so.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / "summary.json"
        self._before = self._content()

    def __call__(self) -> bool:
        content = self._content()
        # An interrupted run is resumed by a new pod of the controller.
        return content != self._before and content.get("exit_reason") in ("completed", "failed")

    def _content(self) -> dict[str, object]:
        try:
            return dict(json.loads(self._file.read_text()))
        except (OSError, ValueError):
            return {}


def run_group(
    role: str, child: Child, command: Sequence[str], runs_end: RunsEnd, pause_s: float = RESTART_PAUSE_S
) -> int:
    """Runs the process of a worker group in its pod, and runs it again whenever it has ended by itself.

    Returns 0 when the training run has ended, else the exit code of the group.
    """

    def end_with_the_run() -> None:
        wait_until(runs_end, inf)
        child.end()

    threading.Thread(target=end_with_the_run, daemon=True).start()
    is_first = True
    while True:
        code = child.run(command)
        if runs_end():
            say(f"the run has ended: the {role} group leaves")
            return 0
        if (code == EXIT_BAD_INPUT and is_first) or child.last_signal is not None:
            return code
        is_first = False  # the same input has worked once, so it is not refused for good
        say(f"the {role} group has ended with exit code {code}: starting it again")
        time.sleep(pause_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
