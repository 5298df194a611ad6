"""Imports that are spared some work end with what they would have made anyway."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from types import ModuleType

import pytest

from splitppo.machine.heavy_imports import hasten, heavy_imports

# Every name of transformers and of its models, with its module and the packages that it needs.
NAMES = """
import hashlib, json, sys
from contextlib import nullcontext
from splitppo.machine.heavy_imports import heavy_imports
with heavy_imports() if sys.argv[1] == "fast" else nullcontext():
    import transformers
    import transformers.models
from transformers.utils import import_utils
found = [
    sorted(vars(module)[name].items() if name != "__all__" else vars(module)[name])
    for module in (transformers, transformers.models)
    for name in ("__all__", "_class_to_module", "_object_missing_backend")
]
is_patched = import_utils.fetch__all__.__module__ != import_utils.__name__
print(json.dumps([is_patched, len(found[0]), hashlib.sha256(repr(found).encode()).hexdigest()]))
"""


def names(how: str) -> list[object]:
    environment = {**os.environ, "PYTHONHASHSEED": "0"}  # some of it is made from sets
    command = [sys.executable, "-c", NAMES, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


def test_transformers_has_the_same_names_from_the_same_modules() -> None:
    (is_patched, num_names, digest), plain = names("fast"), names("plain")
    assert is_patched
    assert isinstance(num_names, int)
    assert num_names > 1000
    assert plain == [False, num_names, digest]


def test_a_module_that_has_changed_is_left_alone() -> None:
    scans = ModuleType("scans")
    scans.__dict__["fetch__all__"] = len
    hasten(scans)
    assert scans.__dict__["fetch__all__"] is len


def test_nothing_of_it_stays_also_after_an_import_that_fails() -> None:
    finders = [*sys.meta_path]
    with pytest.raises(ModuleNotFoundError), heavy_imports():
        import there_is_no_such_module  # noqa: F401
    assert gc.isenabled()
    assert sys.meta_path == finders
