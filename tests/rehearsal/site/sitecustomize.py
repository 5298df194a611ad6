"""Gives torch the pretended CUDA device, in every Python process that has this folder on its PYTHONPATH.

Nothing happens before torch is imported, so processes without torch start as fast as ever. `REHEARSAL_LIBRARY` names
the compiled device, `REHEARSAL_GPUS` the number of GPUs of the machine, which `CUDA_VISIBLE_DEVICES` narrows as always.
"""

import ctypes
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _WithTorch(importlib.abc.MetaPathFinder):
    """Finds torch as everybody does, and installs the device when the import of torch is done."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        # First: the import of torch asks once, and for good, whether there is CUDA.
        ctypes.CDLL(os.environ["REHEARSAL_LIBRARY"], mode=ctypes.RTLD_GLOBAL)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            from pretended_cuda import install

            install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("REHEARSAL_LIBRARY"):
    sys.meta_path.insert(0, _WithTorch())
