"""Checks of settings, secrets and files that a container or pod makes before it starts its role.

This module needs the standard library only.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

EXIT_BAD_INPUT = 2


class Refused(ValueError):
    """Raised for a setting, file or folder that cannot be used; the message is one sentence for the user."""


def number(environment: Mapping[str, str], name: str) -> int:
    """Parses an environment variable as a whole number, 0 or more; Refused if the variable has another value."""
    value = environment.get(name, "")
    if not value.isdecimal():
        raise Refused(f"{name} is {value!r}, expected a number")
    return int(value)


def run_name(environment: Mapping[str, str]) -> str:
    """Returns the name of the run's folder: the variable `RUN`, else the file name in `RECIPE`, else "quickstart"."""
    name = environment.get("RUN") or Path(environment.get("RECIPE") or "quickstart").stem
    if not re.fullmatch(r"[\w][\w.-]*", name):
        raise Refused(f"RUN is {name!r}, expected the name of a folder: letters, digits, dots, hyphens")
    return name


def check_role(role: str, roles: tuple[str, ...]) -> None:
    """Checks that `role` is one of `roles`; Refused otherwise."""
    if role not in roles:
        raise Refused(f"expected one of {', '.join(roles)}, got {role!r}")


def check_secrets(root: Path, role: str, *more: str, source: str, remedy: str) -> None:
    """Checks that the TLS files and the token of a role exist and that this user can read them; Refused otherwise.

    Args:
        root: the folder that holds `secrets`.
        role: the process that the secrets belong to.
        more: names of further files that this role needs, besides certificate, key and token.
        source: the end of the error on a missing file: where the user gets the file.
        remedy: what makes a file readable.
    """
    folder = root / "secrets"
    for name in ("ca.pem", f"{role}.pem", f"{role}.key", "token", *more):
        can_look = os.access(folder, os.X_OK) or not folder.is_dir()
        if can_look and not (folder / name).exists():
            raise Refused(f"/secrets/{name} is missing: {source}")
        check_readable(folder / name, remedy)


def check_readable(path: Path, remedy: str, mode: int = os.R_OK) -> None:
    """Checks that this user can read a file or folder; raises Refused if not, with the advice `remedy`."""
    if not os.access(path, mode):
        raise Refused(f"cannot read {path_and_owner(path)}: {remedy}")


def path_and_owner(path: Path) -> str:
    """Describes a path that cannot be used, with its owner as far as this user can see the owner, for errors."""
    # `stat` needs the right to search the folder of a path.
    nearest = next(place for place in (path, *path.parents) if os.access(place.parent, os.X_OK))
    status = nearest.lstat()
    owner = f"belongs to uid {status.st_uid}, mode {status.st_mode & 0o7777:04o}"
    return f"{path} ({'it' if nearest == path else nearest} {owner}; this container runs as uid {os.getuid()})"
