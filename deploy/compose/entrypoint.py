"""The entry point of every container of deploy/compose: it checks what the container was given, then runs its role.

    entrypoint.py actor|critic|reward|rollout|controller|prepare|certs|own-secrets [key.path=value | --check ...]

It needs the standard library only, so that a mistake is reported at once. Exit codes are those of the role
(docs/running.md), except for groups: a group that refuses its input ends with 0, since the engine would start it again
after any other code (docs/adr/019-containers.md). The engine never restarts the controller, whose exit code is the
run's: a controller that is killed is started again from here.
"""

import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.checks import EXIT_BAD_INPUT, Refused, check_readable, check_role, check_secrets, path_and_owner, run_name
from deploy.placement import PORTS, GroupPlace, overrides
from deploy.processes import Child, module_of, run_role, say

ROLES = (*PORTS, "controller", "prepare", "certs", "own-secrets")
RECIPE = Path("/recipe.yaml")
# The recipe's paths are relative to a checkout; in containers its files are in the volume that `prepare` has filled.
QUICKSTART = (
    "actor.model=/models/sort_letters/model",
    "data.train_files=/data/sort_letters/train.parquet",
    "data.val_files=/data/sort_letters/val.parquet",
)
_GPU = re.compile(r"\d+|GPU-[0-9a-f-]+")


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Runs the container's role (first argument: actor, controller, ...); returns the exit code.

    `root` is the folder of the volumes.
    """
    role, *more = arguments or [""]
    code = run_role(role, lambda: command_of(role, more, environment, root), run_group)
    return 0 if role in PORTS and code == EXIT_BAD_INPUT else code


def run_group(role: str, child: Child, command: Sequence[str]) -> int:
    """Runs a worker group once: Docker starts the container again, unless the group has refused its input.

    Returns the group's own code; the caller, `main`, turns EXIT_BAD_INPUT into 0.
    """
    code = child.run(command)
    if code == EXIT_BAD_INPUT:
        say(f"the {role} group has refused its input, so it is not started again")
    return code


def command_of(
    role: str, more: Sequence[str], environment: Mapping[str, str], root: Path = Path("/")
) -> list[str] | None:
    """Checks what the container of a role was given; returns the role's command line, None if there is nothing to do.

    Raises:
        Refused: there is no such role; a volume, a secret, the recipe or a list of GPUs cannot be used.
    """
    check_role(role, ROLES)
    if role == "rollout" and not has_rollout_group(environment):
        profiles = environment.get("COMPOSE_PROFILES", "")
        remedy = "set it in .env, so that all processes know of this group"
        raise Refused(f"COMPOSE_PROFILES is {profiles!r}, expected rollout in it: {remedy}")
    if role == "own-secrets":
        say("secrets come from SECRETS_DIR: no certificates are made")
        return None
    python = [sys.executable, "-m"]
    if role == "certs":
        check_writable(root, "authority", *(f"spread/{process}" for process in (*PORTS, "controller")))
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
    own = f"SECRETS_DIR/{role}"
    health = ("health.pem", "health.key") if role in PORTS else ()
    source = f"start the service certs, or put it into {own}"
    check_secrets(root, role, *health, source=source, remedy=f"chown -R {os.getuid()} {own}")
    return [*python, module_of(role), "--config", str(RECIPE), *common_overrides(environment, gpus), *more]


def common_overrides(environment: Mapping[str, str], gpus: Mapping[str, Sequence[str]]) -> list[str]:
    """Makes the configuration overrides of this deployment, which worker groups and controller apply to the recipe.

    A place for a rollout group makes the run have one; the other groups exist by keys of the recipe. GPUs of the critic
    in the list of the rollout group make the two groups take turns.

    Args:
        environment: the environment of the container.
        gpus: the GPUs of each group; a container sees its own GPUs as 0, 1, ... A group without an entry has the
            recipe's placement, on the CPU.
    """
    groups = [role for role in PORTS if role != "rollout" or has_rollout_group(environment)]
    places = {role: GroupPlace(role, 1, len(gpus[role]) if role in gpus else None) for role in groups}
    more = [] if environment.get("RECIPE") else [*QUICKSTART]
    if "rollout" in places and "rollout" in gpus:
        takes_turns = not set(gpus["rollout"]).isdisjoint(gpus["critic"])
        more.append(f"services.allow_shared_devices={str(takes_turns).lower()}")
    return overrides(f"/runs/{run_name(environment)}", "/secrets", places, environment, more)


def has_rollout_group(environment: Mapping[str, str]) -> bool:
    """Returns True if the profile `rollout` of Compose is in the variable `COMPOSE_PROFILES`."""
    return "rollout" in environment.get("COMPOSE_PROFILES", "").split(",")


def gpus_of(environment: Mapping[str, str], role: str) -> dict[str, list[str]]:
    """Parses `ACTOR_GPUS`, `CRITIC_GPUS`, ... into a list of GPUs for each group; {} if none is set.

    Only a container whose `role` is reward or rollout must have that group's list.

    Raises:
        Refused: a list makes no sense, a list is missing, or two lists overlap that are not of critic and rollout.
    """
    lists = {group: environment.get(f"{group.upper()}_GPUS", "") for group in PORTS}
    gpus = {group: value.split(",") for group, value in lists.items() if value}
    for group, own in gpus.items():
        if not all(map(_GPU.fullmatch, own)) or len(set(own)) < len(own):
            name = f"{group.upper()}_GPUS"
            raise Refused(f"{name} is {lists[group]!r}, expected different GPUs with commas between, such as 0,1,2")
    for (group, own), (other, others) in itertools.combinations(gpus.items(), 2):
        shared = ",".join(sorted(set(own) & set(others)))
        if shared and (group, other) != ("critic", "rollout"):
            both = f"{group.upper()}_GPUS ({','.join(own)}) and {other.upper()}_GPUS ({','.join(others)})"
            raise Refused(f"{both} overlap in {shared}: give each group its own GPUs")
    for group in PORTS if gpus else ():
        if group not in gpus and group in ("actor", "critic", role):
            given = " and ".join(f"{name.upper()}_GPUS" for name in gpus)
            raise Refused(f"{group.upper()}_GPUS is not set, expected a list for each group, as in {given}")
    return gpus


def check_recipe(environment: Mapping[str, str], root: Path) -> None:
    """Checks that RECIPE is a readable file, and that DATA_DIR and MODEL_DIR are set only with RECIPE; else Refused."""
    recipe = environment.get("RECIPE")
    for name in ("DATA_DIR", "MODEL_DIR"):
        if environment.get(name) and not recipe:
            raise Refused(f"{name} is set and RECIPE is not: the quickstart takes what the service prepare makes")
    file = root / RECIPE.relative_to("/")
    if not file.is_file():
        raise Refused(f"RECIPE={recipe or ''} is no file: expected the YAML configuration of a run")
    check_readable(file, "chmod a+r RECIPE")


def check_volumes(role: str, environment: Mapping[str, str], root: Path) -> None:
    """Checks that the container's volumes are filled, and that its user can use them; raises Refused if not."""
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


def check_writable(root: Path, *folders: str) -> None:
    """Checks that the container's user can write to these volumes; raises Refused if not."""
    for folder in folders:
        if not os.access(root / folder, os.W_OK | os.X_OK):
            remedy = f"chown -R {os.getuid()} RUNS_DIR" if folder == "runs" else "remove the volume"
            owner = path_and_owner(root / folder)
            raise Refused(f"cannot write to {owner}: {remedy} (docker compose down -v removes volumes)")


def warn_of_unreadable(folder: Path, variable: str) -> None:
    """Prints a warning with one file that the container's user cannot read, if there is such a file in the folder.

    Libraries may say that the file does not exist.
    """
    files = (Path(directory, name) for directory, _, names in os.walk(folder) for name in names)
    if unreadable := next((file for file in files if not os.access(file, os.R_OK)), None):
        say(f"warning: cannot read {path_and_owner(unreadable)}: chmod -R a+rX {variable}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
