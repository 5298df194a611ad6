"""What every container of deploy/compose starts: checks what the container was given, then runs its role.

    entrypoint.py actor|critic|reward|controller|prepare|certs|own-secrets [key.path=value | --check ...]

Standard library only, so that a mistake is told at once. Exit codes are those of the role (docs/running.md), but for
groups: input that they refuse ends them with 0, since the engine would start any other code again
(docs/adr/019-containers.md). The engine never restarts the controller, whose exit code is the run's: one that is killed
is started again from here.
"""

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from deploy.placement import PORTS, GroupPlace, overrides

GROUPS = PORTS
ROLES = (*GROUPS, "controller", "prepare", "certs", "own-secrets")
EXIT_BAD_INPUT = 2
MAX_RESTARTS = 5
RESTART_PAUSE_S = 2.0
RECIPE = Path("/recipe.yaml")
# The recipe names its files relative to a checkout; in containers they lie in the volume that `prepare` has filled.
QUICKSTART = (
    "actor.model=/models/sort_letters/model",
    "data.train_files=/data/sort_letters/train.parquet",
    "data.val_files=/data/sort_letters/val.parquet",
)
_GPU = re.compile(r"\d+|GPU-[0-9a-f-]+")


class Refused(Exception):
    """What the container was given cannot be used; the message is one sentence for whoever wrote `.env`."""


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Runs the role that the first argument names and returns the exit code; `root` is where the volumes are."""
    role, *more = arguments or [""]
    try:
        if role not in ROLES:
            raise Refused(f"expected one of {', '.join(ROLES)}, got {role!r}")
        if role == "own-secrets":
            say("secrets come from SECRETS_DIR: no certificates are made")
            return 0
        command = command_of(role, more, environment, root)
    except Refused as refused:
        say(f"error: {refused}")
        return 0 if role in GROUPS else EXIT_BAD_INPUT
    if command is None:
        return 0
    child = Child()
    if role == "controller":
        return run_controller(lambda: child.run(command))
    code = child.run(command)
    if role in GROUPS and code == EXIT_BAD_INPUT:
        say(f"the {role} group has refused its input, so it is not started again")
        return 0
    return code


def command_of(
    role: str, more: Sequence[str], environment: Mapping[str, str], root: Path = Path("/")
) -> list[str] | None:
    """The command of a role, None where there is nothing to do.

    Raises:
        Refused: a volume, a secret, the recipe or a list of GPUs cannot be used.
    """
    python = [sys.executable, "-m"]
    if role == "certs":
        check_writable(root, "authority", *(f"spread/{one}" for one in (*GROUPS, "controller")))
        spread = ["--out", "/authority", "--spread", "/spread", "--once"]
        return [*python, "tools.certs", *spread, "--hosts", "localhost", *more]
    gpus = gpus_of(environment, role)
    check_recipe(environment, root)
    if role == "prepare":
        if environment.get("RECIPE"):
            say("RECIPE is your own: nothing is prepared")
            return None
        check_writable(root, "prepared")
        return [*python, "recipes.sort_letters.prepare", "--output", "/prepared/sort_letters", *more]
    check_volumes(role, environment, root)
    check_secrets(role, root)
    module = "controller" if role == "controller" else f"services.{role}"
    return [*python, module, "--config", str(RECIPE), *common_overrides(environment, gpus), *more]


def common_overrides(environment: Mapping[str, str], gpus: Mapping[str, Sequence[str]]) -> list[str]:
    """What groups and controller are told on top of the recipe; `OVERRIDES` comes last, and wins.

    Args:
        environment: of the container.
        gpus: of each group; a container sees its own ones as 0, 1, ... None: the recipe's placement, on the CPU.
    """
    places = {role: GroupPlace(role, 1, len(gpus[role]) if role in gpus else None) for role in GROUPS}
    placed = overrides(f"/runs/{run_name(environment)}", "/secrets", "/secrets/{role}", places)
    quickstart = () if environment.get("RECIPE") else QUICKSTART
    return [*placed, *quickstart, *shlex.split(environment.get("OVERRIDES", ""))]


def run_name(environment: Mapping[str, str]) -> str:
    """The folder of the run under /runs: `RUN`, else the name of the recipe's file, else quickstart."""
    name = environment.get("RUN") or Path(environment.get("RECIPE") or "quickstart").stem
    if not re.fullmatch(r"[\w][\w.-]*", name):
        raise Refused(f"RUN is {name!r}, expected the name of a folder: letters, digits, dots, hyphens")
    return name


def gpus_of(environment: Mapping[str, str], role: str) -> dict[str, list[str]]:
    """The GPUs of each group by `ACTOR_GPUS`, `CRITIC_GPUS` and `REWARD_GPUS`; nothing where none is set.

    Only a container whose `role` is reward asks for the third list.

    Raises:
        Refused: a list makes no sense, one of them is missing, or two overlap.
    """
    gpus = {}
    for group in GROUPS:
        name = f"{group.upper()}_GPUS"
        if not (value := environment.get(name, "")):
            continue
        gpus[group] = value.split(",")
        if not all(map(_GPU.fullmatch, gpus[group])) or len(set(gpus[group])) < len(gpus[group]):
            raise Refused(f"{name} is {value!r}, expected different GPUs with commas between, such as 0,1,2")
    for (one, ones), (other, others) in itertools.combinations(gpus.items(), 2):
        if shared := ",".join(sorted(set(ones) & set(others))):
            both = f"{one.upper()}_GPUS ({','.join(ones)}) and {other.upper()}_GPUS ({','.join(others)})"
            raise Refused(f"{both} overlap in {shared}: give each group its own GPUs")
    for group in GROUPS if gpus else ():
        if group not in gpus and group in ("actor", "critic", role):
            given = " and ".join(f"{one.upper()}_GPUS" for one in gpus)
            raise Refused(f"{group.upper()}_GPUS is not set, expected a list for each group, as in {given}")
    return gpus


def check_recipe(environment: Mapping[str, str], root: Path) -> None:
    """Refuses a recipe that is no file, and data and models of one's own without a recipe of one's own."""
    recipe = environment.get("RECIPE")
    for name in ("DATA_DIR", "MODEL_DIR"):
        if environment.get(name) and not recipe:
            raise Refused(f"{name} is set and RECIPE is not: the quickstart takes what the service prepare makes")
    file = root / RECIPE.relative_to("/")
    if not file.is_file():
        raise Refused(f"RECIPE={recipe or ''} is no file: expected the YAML configuration of a run")
    check_readable(file, "chmod a+r RECIPE")


def check_volumes(role: str, environment: Mapping[str, str], root: Path) -> None:
    """Refuses volumes that are empty, or that this container's user cannot use."""
    check_writable(root, "runs", "cache")
    needed = {"models": "MODEL_DIR", **({"data": "DATA_DIR"} if role == "controller" else {})}
    for folder, variable in needed.items():
        check_readable(root / folder, f"chmod -R a+rX {variable}", os.R_OK | os.X_OK)
        is_own = bool(environment.get(variable))
        if not environment.get("RECIPE") and not (root / folder / "sort_letters").is_dir():
            raise Refused(f"/{folder} holds no sort_letters: start the service prepare, which fills this volume")
        if is_own and not any((root / folder).iterdir()):
            raise Refused(f"{variable}={environment[variable]} is empty: expected what RECIPE names under /{folder}")
        if is_own:
            warn_of_unreadable(root / folder, variable)


def check_secrets(role: str, root: Path) -> None:
    """Refuses secrets that are missing, or that this container's user cannot read."""
    names = ["ca.pem", f"{role}.pem", f"{role}.key", "token"]
    for name in [*names, *(("health.pem", "health.key") if role in GROUPS else ())]:
        file = root / "secrets" / name
        if os.access(root / "secrets", os.X_OK) and not file.exists():
            raise Refused(f"/secrets/{name} is missing: start the service certs, or put it into SECRETS_DIR/{role}")
        check_readable(file, f"chown -R {os.getuid()} SECRETS_DIR/{role}")


def check_readable(path: Path, remedy: str, mode: int = os.R_OK) -> None:
    """Refuses a file or folder that this container's user cannot read; `remedy` is a command for the host."""
    if not os.access(path, mode):
        raise Refused(f"cannot read {_whose(path)}: {remedy}")


def check_writable(root: Path, *folders: str) -> None:
    """Refuses volumes that this container's user cannot write to."""
    for folder in folders:
        if not os.access(root / folder, os.W_OK | os.X_OK):
            remedy = f"chown -R {os.getuid()} RUNS_DIR" if folder == "runs" else "remove the volume"
            raise Refused(f"cannot write to {_whose(root / folder)}: {remedy} (docker compose down -v removes volumes)")


def warn_of_unreadable(folder: Path, variable: str) -> None:
    """Names one file that this container's user cannot read: libraries may say that it does not exist."""
    for directory, _, names in os.walk(folder):
        for name in names:
            if not os.access(Path(directory, name), os.R_OK):
                return say(f"warning: cannot read {_whose(Path(directory, name))}: chmod -R a+rX {variable}")
    return None


def _whose(path: Path) -> str:
    """A path that cannot be used, and whose it is, as far as this user can see."""
    nearest = next(one for one in (path, *path.parents) if os.access(one.parent, os.X_OK))  # stat needs its folder
    status = nearest.lstat()
    owner = f"belongs to uid {status.st_uid}, mode {status.st_mode & 0o7777:04o}"
    return f"{path} ({'it' if nearest == path else nearest} {owner}; this container runs as uid {os.getuid()})"


def run_controller(run: Callable[[], int], pause_s: float = RESTART_PAUSE_S) -> int:
    """Runs the controller, again where a signal that nobody sent to this container has ended it; its exit code."""
    code = run()
    for restart in range(1, MAX_RESTARTS + 1):
        if code != 128 + signal.SIGKILL:
            break
        say(f"the controller was killed: starting it again ({restart} of {MAX_RESTARTS}), to resume the run")
        time.sleep(pause_s)
        code = run()
    return code


class Child:
    """The one process that runs under this one; SIGTERM and SIGINT are handed on to it.

    Attributes:
        told: the last signal that has come, to this process or by `end`; nothing is started after it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.told: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hand_on)

    def _hand_on(self, number: int, _: FrameType | None = None) -> None:
        self.told = number
        if self._process is not None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Lets what runs drain, as SIGTERM does."""
        self._hand_on(signal.SIGTERM)

    def run(self, command: Sequence[str]) -> int:
        """Runs a command to its end; its exit code, 128 + n where signal n has ended it, or has come before."""
        if self.told is not None:
            return 128 + self.told
        process = subprocess.Popen(command)
        self._process = process
        if self.told is not None:
            process.send_signal(self.told)
        code = process.wait()
        self._process = None
        return code if code >= 0 else 128 - code


def say(sentence: str) -> None:
    """One line on stderr, at once."""
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
