"""Loads a function or class from a Python file of the user, or reads a function's parameters without running it.

Scoring processes import this module, so it imports nothing heavy.
"""

import ast
import importlib.util
import os
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from splitppo.config_error import ConfigError, did_you_mean

_folders: list[str] = []  # of users' files, which import_file has added to the import path


def load_from_file(path: Path, name: str, *, path_key: str, name_key: str) -> Any:
    """Imports the user's Python file `path` and returns the class or function `name` of it.

    `path_key` and `name_key` are the configuration keys that errors name.

    Raises:
        ConfigError: the file does not exist, importing it fails, or it has no callable of that name; one sentence.
    """
    return callable_of(import_file(path, path_key), name, name_key)


def import_file(path: Path, key: str) -> ModuleType:
    """Imports the user's Python file `path`, which the configuration key `key` names.

    Modules that lie beside the file can be imported, by it and later; those of PYTHONPATH and of the folder of the
    command come first. The import writes no bytecode, so no `__pycache__` is left in the user's folder, neither for
    this file nor for the modules that it imports.

    Raises:
        ConfigError: the file does not exist, or importing it fails; or it imports a module that lies beside it, and a
            file of another folder has imported one of that name; one sentence.
    """
    if not path.is_file():
        raise ConfigError(f"key '{key}': there is no file {path}")
    spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", f"splitppo_user_{key}_{path}"), path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"key '{key}': {path} is not a Python file")
    folder = str(path.resolve().parent)
    if other := _namesake(path, folder):
        raise ConfigError(
            f"key '{key}': {path} imports {other.__name__}, which lies beside it, but in this process that name is"
            f" {other.__file__}; give one of them another name"
        )
    if folder not in sys.path:
        sys.path.append(folder)
        _folders.append(folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # before it runs: dataclasses and pickle look the module up by its name
    writes_no_bytecode = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        line = line_in(path, error).removeprefix(", ")
        reason = describe(error) + (f" ({line})" if line else "")
        raise ConfigError(f"key '{key}': importing {path} failed: {reason}") from error
    finally:
        sys.dont_write_bytecode = writes_no_bytecode
    return module


def _namesake(path: Path, folder: str) -> ModuleType | None:
    """Returns a module that lies beside another user's file and has the name of one that this file means beside it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # the import itself says so
        return None
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    named = {alias.name for node in imports for alias in node.names}
    named |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    for name in sorted({full.partition(".")[0] for full in named}):
        module = sys.modules.get(name)
        lies_in = _folder_of(module)
        is_beside = Path(folder, f"{name}.py").is_file() or Path(folder, name).is_dir()
        if is_beside and lies_in != folder and lies_in in _folders:
            return module
    return None


def _folder_of(module: ModuleType | None) -> str:
    """Returns the folder in which a module or package lies; empty if it lies nowhere."""
    file = getattr(module, "__file__", None)
    if not file:
        return ""
    place = Path(file).resolve().parent
    return str(place.parent if Path(file).name == "__init__.py" else place)


def callable_of(module: ModuleType, name: str, key: str) -> Any:
    """Returns the class or function `name` of an imported file; ConfigError names the key if there is none."""
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"key '{key}': {module.__file__} has no class or function {name!r}")
    return found


def read_parameters(path: Path, name: str, *, path_key: str, name_key: str) -> dict[str, bool]:
    """Reads the parameters of a function at the top level of a Python file, without running the file.

    Returns for each parameter, by name, whether it must be given. `path_key` and `name_key` begin the sentences of
    errors.

    Raises:
        ConfigError: the file does not exist, cannot be read, is not Python, or has no function `name`.
    """
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        reason = f"cannot read {path}: {error}" if path.is_file() else f"there is no file {path}"
        raise ConfigError(f"{path_key}: {reason}") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path_key}: {path} is not a Python file: {describe(error)}") from error
    functions = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    if name not in functions:
        hint = did_you_mean(name, functions) or f"; it has {', '.join(functions) or 'none'}"
        raise ConfigError(f"{name_key}: {path} has no function {name!r}{hint}")
    arguments = functions[name]
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults, *arguments.kw_defaults]
    parameters = zip([*positional, *arguments.kwonlyargs], defaults, strict=True)
    return {parameter.arg: default is None for parameter, default in parameters}


def line_in(path: str | Path, error: BaseException) -> str:
    """Returns ", line N": the line of a user's file in which an exception was raised, or which called what raised it.

    The text is empty if the exception passed through no line of the file.
    """
    file = os.path.realpath(path)
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if os.path.realpath(frame.f_code.co_filename) == file]
    return f", line {lines[-1]}" if lines else ""


def describe(error: BaseException) -> str:
    """Returns the type of an exception and its message, if it has one, as one line of text."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
