"""Counts the lines of the product without comments, docstrings, blank lines and generated code, folder by folder.

JavaScript counts as Python does; what others have written (a folder vendor) does not.

python -m tools.product_lines                  # the working tree
python -m tools.product_lines --ref COMMIT     # beside it that commit, and the difference

A folder counts with all below it; the table has two levels of them.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("controller", "environments", "services", "splitppo", "rewards", "recipes", "deploy", "viewer")
GENERATED = ("_pb2.py", "_pb2_grpc.py")
SUFFIXES = (".py", ".js")
ALL = "all"
_NO_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status, 2 for a commit that git does not know."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.product_lines", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ref", metavar="COMMIT", help="a commit to count beside the working tree")
    ref = parser.parse_args(arguments).ref
    try:
        before = lines_of_folders(commit(ref)) if ref is not None else None
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"error: {error.stderr.decode().strip()}\n")
        return 2
    now = lines_of_folders(working_tree())
    if before is None:
        rows = [(f"{now[folder]:6,}", folder) for folder in sorted(now)]
    else:
        rows = [(f"{'then':>6} {'now':>6} {'more':>7}", "folder")] + [
            (f"{before[folder]:6,} {now[folder]:6,} {now[folder] - before[folder]:+7,}", folder)
            for folder in sorted({*before, *now})
        ]
    sys.stdout.write("".join(f"{numbers}  {folder}\n" for numbers, folder in rows))
    return 0


def working_tree() -> Iterable[tuple[PurePosixPath, str]]:
    """Yields path and source of each file of the product as it is now."""
    for folder in PRODUCT:
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in SUFFIXES:
                yield PurePosixPath(file.relative_to(ROOT)), file.read_text(encoding="utf-8")


def commit(ref: str) -> Iterable[tuple[PurePosixPath, str]]:
    """Yields path and source of each file of the product at a commit.

    Raises:
        subprocess.CalledProcessError: git knows no such commit.
    """
    packed = subprocess.run(["git", "archive", ref], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            content = archive.extractfile(member) if path.suffix in SUFFIXES and path.parts[0] in PRODUCT else None
            if content is not None:
                yield path, content.read().decode()


def lines_of_folders(files: Iterable[tuple[PurePosixPath, str]]) -> Mapping[str, int]:
    """Returns the lines of each folder with all below it, of no more than two levels, and of ALL."""
    lines: Counter[str] = Counter()
    for path, source in files:
        if not path.name.endswith(GENERATED) and "vendor" not in path.parts:
            folders = {"/".join(path.parent.parts[:depth]) for depth in (1, 2)}
            count = num_lines if path.suffix == ".py" else num_script_lines
            lines.update(dict.fromkeys([ALL, *folders], count(source)))
    return lines


def num_lines(source: str) -> int:
    """Returns how many lines of Python source hold code."""
    docstrings = {line for node in ast.walk(ast.parse(source)) for line in _docstring_lines(node)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {line for token in tokens if token.type not in _NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    return len(code - docstrings)


def num_script_lines(source: str) -> int:
    """Returns how many lines of JavaScript hold code: neither blank nor a comment from their first character on."""
    return sum(1 for line in source.splitlines() if line.strip() and not line.lstrip().startswith("//"))


def _docstring_lines(node: ast.AST) -> range:
    """Returns the lines of a statement that is only a text: a docstring, also of an attribute above it."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)):
        return range(0)
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


if __name__ == "__main__":
    sys.exit(main())
