"""Generates the Python stubs of proto/ into a source tree; `make proto` calls it with `--out .`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Runs protoc; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="tree that gets splitppo/v1/*_pb2*.py")
    out: Path = parser.parse_args().out
    protos = sorted((ROOT / "proto").rglob("*.proto"))
    command = ["protoc", f"-I{ROOT / 'proto'}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if status := protoc.main([*command, *map(str, protos)]):
        return int(status)
    for proto in protos:
        if "\nservice " not in proto.read_text(encoding="utf-8"):  # only messages: an empty module
            (out / proto.relative_to(ROOT / "proto").with_suffix("")).with_name(f"{proto.stem}_pb2_grpc.py").unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
