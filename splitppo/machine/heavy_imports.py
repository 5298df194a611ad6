"""Imports modules faster that make very many objects, as torch does, or read very many files, as transformers does."""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_SCANS = "transformers.utils.import_utils"


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Makes imports in the `with` block faster: those of a rank take a third less time.

    Python's search for cyclic garbage rests; what the imports have made stays out of later searches, too, for it is
    never garbage. transformers looks for the names in its 1,600 files once, and faster.
    """
    scans = _FasterScans()
    sys.meta_path.insert(0, scans)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        sys.meta_path.remove(scans)


class _FasterScans(MetaPathFinder):
    """Finds the module with which transformers reads its own files; all that it finds is the same."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns a spec for that one module, which is made faster once it is executed; None for every other one."""
        spec = PathFinder.find_spec(name, path, target) if name == _SCANS else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                hasten(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def hasten(scans: ModuleType) -> None:
    """Makes two functions of transformers' import_utils (5.16 to 5.19) faster; leaves a module without them as it is.

    One looks for the last line of a file that begins with `__all__` by looking at each of its lines. The other one,
    which keeps what it has found, is asked twice for the same folder: as a folder, and as the `__init__.py` in it.
    """
    names_of, structure_of = (
        getattr(scans, name, None) for name in ("fetch__all__", "create_import_structure_from_path")
    )
    if names_of is None or structure_of is None:
        return

    def fetch__all__(content: str) -> list[str]:
        found: list[str] = names_of(content[content.rfind("\n__all__") + 1 :])
        return found

    def create_import_structure_from_path(path: str | Path) -> Any:
        return structure_of(Path(path).parent if Path(path).is_file() else Path(path))

    scans.__dict__.update(
        fetch__all__=fetch__all__, create_import_structure_from_path=create_import_structure_from_path
    )
