"""Checks before a run starts that trackers can be used: their packages, their logins, their addresses."""

import importlib.util
import os
import sys
from pathlib import Path

from splitppo.our_commands import our_python

# The packages that a tracker imports, and how to install them. SwanLab needs another protobuf than the run.
_PACKAGES = {
    "tensorboard": (("tensorboard",), "{} -m pip install tensorboard"),
    "wandb": (("wandb", "PIL"), "{} -m pip install 'splitppo[wandb]'"),
    "mlflow": (("mlflow",), "{} -m pip install 'splitppo[mlflow]'"),
    "swanlab": (("swanlab", "PIL"), "pip install swanlab pillow in a Python of its own, which tracking.python names"),
    "trackio": (("trackio", "PIL"), "{} -m pip install 'splitppo[trackio]'"),
}


_MLFLOW_SERVERS = ("http", "https", "databricks")


def problem(name: str) -> str | None:
    """Returns a sentence why this Python cannot use a tracker; None if it can. Makes no call to a server."""
    packages, remedy = _PACKAGES[name]
    if missing := [package for package in packages if not _is_installed(package)]:
        sentence = f"{name} needs {' and '.join(missing)}, which {sys.executable} does not have"
        return f"{sentence}: {remedy.format(our_python())}"
    check = {"wandb": _wandb, "mlflow": _mlflow, "swanlab": _swanlab}.get(name)
    return check() if check else None


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder that is no package has no origin


def _wandb() -> str | None:
    import wandb

    if wandb.setup().settings.mode not in ("online", "shared") or wandb.login(prompt=False, verify=False):
        return None
    return "wandb has no API key: set WANDB_API_KEY, call `wandb login`, or set WANDB_MODE=offline"


def _mlflow() -> str | None:
    has_database = importlib.util.find_spec("sqlalchemy") is not None
    return mlflow_problem(os.environ.get("MLFLOW_TRACKING_URI", ""), has_database=has_database)


def mlflow_problem(uri: str, *, has_database: bool) -> str | None:
    """Returns a sentence why the server or store of MLFLOW_TRACKING_URI cannot be used; None if it can.

    Without `has_database`, the client is mlflow-skinny, which can only use servers.
    """
    scheme = uri.partition(":")[0]
    if scheme in _MLFLOW_SERVERS or has_database:
        return None
    if not uri:
        return "mlflow has no server: set MLFLOW_TRACKING_URI to its address"
    return (
        f"MLFLOW_TRACKING_URI begins with {scheme}:, which the client without a database (mlflow-skinny) cannot use:"
        " expected the http address of a server, or pip install mlflow in a Python that tracking.python names"
    )


def _swanlab() -> str | None:
    if os.environ.get("SWANLAB_MODE", "online") not in ("online", "cloud") or os.environ.get("SWANLAB_API_KEY"):
        return None
    folders = (Path(".swanlab"), Path(os.environ.get("SWANLAB_SAVE_DIR", "~/.swanlab")).expanduser())
    if any((folder / ".netrc").exists() for folder in folders):
        return None
    return "swanlab has no API key: set SWANLAB_API_KEY, call `swanlab login`, or set SWANLAB_MODE=offline"
