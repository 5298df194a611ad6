"""What every pod of deploy/k8s starts: checks what it was given, then runs its role.

    entrypoint.py actor|critic|reward|controller|prepare [key.path=value | --check ...]

Standard library only, so that a mistake is told at once. A group that ends is started again inside its pod, until its
input is refused or the run has ended; then its GPUs are free. Exit codes are those of the role (docs/running.md); 2 and
a controller's 1 end the Job, any other is followed by a new pod.
"""

import json
import os
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.compose.entrypoint import (
    EXIT_BAD_INPUT,
    RESTART_PAUSE_S,
    Child,
    Refused,
    check_readable,
    run_controller,
    run_name,
    say,
)
from deploy.placement import PORTS, GroupPlace, overrides

ROLES = (*PORTS, "controller", "prepare")
QUICKSTART = "/app/recipes/sort_letters/cpu.yaml"
PREPARED = "storage/prepared/sort_letters"
# A cluster may have to make a node and load an image before the last pod starts; all others wait, as do the probes.
START_TIMEOUT_S = 1800.0
POLL_INTERVAL_S = 5.0


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Runs the role that the first argument names and returns the exit code; `root` is where the volumes are."""
    role, *more = arguments or [""]
    try:
        command = command_of(role, more, environment, root)
    except Refused as refused:
        say(f"error: {refused}")
        return EXIT_BAD_INPUT
    if command is None:
        return 0
    child = Child()
    if role == "controller":
        return run_controller(lambda: child.run(command))
    if role == "prepare":
        return child.run(command)
    return run_group(role, child, command, RunsEnd(root / "storage/runs" / run_name(environment)))


def command_of(
    role: str, more: Sequence[str], environment: Mapping[str, str], root: Path = Path("/")
) -> list[str] | None:
    """The command of a role, None where there is nothing to do.

    Raises:
        Refused: a setting, a secret or the claim cannot be used.
    """
    if role not in ROLES:
        raise Refused(f"expected one of {', '.join(ROLES)}, got {role!r}")
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
    for name in ("ca.pem", f"{role}.pem", f"{role}.key", "token"):
        if not (root / "secrets" / name).exists():
            raise Refused(f"/secrets/{name} is missing: the Secrets are {role}-tls, health-tls and token")
        check_readable(root / "secrets" / name, "the pod's fsGroup gives it to gid 10001")
    if recipe == QUICKSTART:
        wait_until_prepared(root / PREPARED)
    if role in places and places[role].num_nodes > 1:
        wait_for_name(places[role], environment)
    module = "controller" if role == "controller" else f"services.{role}"
    return [*python, module, "--config", recipe, *common_overrides(environment), *more]


def common_overrides(environment: Mapping[str, str]) -> list[str]:
    """What groups and controller are told on top of the recipe; `OVERRIDES` comes last, and wins."""
    said = overrides(f"/storage/runs/{run_name(environment)}", "/secrets", "/secrets/{role}", places_of(environment))
    said += [f"services.start_timeout_s={START_TIMEOUT_S:g}"]
    if environment["RECIPE"] == QUICKSTART:
        said += [f"actor.model=/{PREPARED}/model"]
        said += [f"data.{part}_files=/{PREPARED}/{part}.parquet" for part in ("train", "val")]
    return [*said, *shlex.split(environment.get("OVERRIDES", ""))]


def places_of(environment: Mapping[str, str]) -> dict[str, GroupPlace]:
    """Where each group is: behind the Service of its name.

    Raises:
        Refused: a number is none.
    """
    places = {}
    for role in PORTS:
        names = (f"{role.upper()}_NODES", f"{role.upper()}_GPUS")
        for name in names:
            if not re.fullmatch(r"\d+", environment.get(name, "")):
                raise Refused(f"{name} is {environment.get(name, '')!r}, expected a number")
        num_nodes, num_gpus = (int(environment[name]) for name in names)
        if num_nodes:
            places[role] = GroupPlace(role, num_nodes, num_gpus or None, f"{role}-0.{role}-nodes")
    return places


def wait_for_name(place: GroupPlace, environment: Mapping[str, str], timeout_s: float = START_TIMEOUT_S) -> None:
    """Waits until the name of the group's first pod is known, and there is the pod's own: a new pod has a new address.

    Raises:
        Refused: it is not in time.
    """
    is_first = environment["JOB_COMPLETION_INDEX"] == "0"
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            found = {str(one[4][0]) for one in socket.getaddrinfo(place.meeting, None)}
        except OSError:
            found = set()
        if environment["POD_IP"] in found if is_first else found:
            return
        if time.monotonic() > deadline:
            known = ", ".join(found) or "unknown"
            expected = environment["POD_IP"] if is_first else "an address"
            raise Refused(
                f"{place.meeting} is {known} after {timeout_s:g} s, expected {expected}: the Service of that name"
            )
        time.sleep(POLL_INTERVAL_S)


def wait_until_prepared(folder: Path, timeout_s: float = START_TIMEOUT_S) -> None:
    """Waits for what the Job prepare makes, which appears whole or not at all."""
    deadline = time.monotonic() + timeout_s
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise Refused(f"{folder} is not there after {timeout_s:g} s: kubectl logs job/prepare")
        time.sleep(POLL_INTERVAL_S)


class RunsEnd:
    """Whether a run has ended, for good, since this was made: its folder has a new summary that says so."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / "summary.json"
        self._before = self._content()

    def __call__(self) -> bool:
        content = self._content()
        # What is interrupted is resumed, by a new pod of the controller.
        return content != self._before and content.get("exit_reason") in ("completed", "failed")

    def _content(self) -> dict[str, object]:
        try:
            content: dict[str, object] = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return content


def run_group(
    role: str, child: Child, command: Sequence[str], runs_end: RunsEnd, pause_s: float = RESTART_PAUSE_S
) -> int:
    """Runs a group, again whenever it has ended by itself; 0 when the run has ended, else its own exit code."""
    over = threading.Event()

    def watch() -> None:
        while not runs_end():
            time.sleep(POLL_INTERVAL_S)
        over.set()
        child.end()

    threading.Thread(target=watch, daemon=True).start()
    is_first = True
    while True:
        code = child.run(command)
        if over.is_set():
            say(f"the run has ended: the {role} group leaves")
            return 0
        if (code == EXIT_BAD_INPUT and is_first) or child.told is not None:
            return code
        is_first = False  # later on the same input has worked before
        say(f"the {role} group has ended with exit code {code}: starting it again")
        time.sleep(pause_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
