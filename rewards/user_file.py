"""Python files of the user: imported by path, and one object taken.

Scoring processes import it: it stays light.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any


def load_from_file(path: Path, name: str, *, path_key: str, name_key: str) -> Any:
    """Imports the file that the key `path_key` names and returns its `name`, which `name_key` names.

    Raises:
        ValueError: there is no such file, importing it fails, or it has no callable of that name; one sentence.
    """
    if not path.is_file():
        raise ValueError(f"key '{path_key}': there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"splitppo_user_{path_key.replace('.', '_')}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"key '{path_key}': {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # before it runs: dataclasses and pickle look the module up by its name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"key '{path_key}': importing {path} failed: {describe(error)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"key '{name_key}': {path} has no class or function {name!r}")
    return found


def describe(error: BaseException) -> str:
    """What a user's code has raised, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
