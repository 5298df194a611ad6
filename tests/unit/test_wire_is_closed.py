"""Nothing from the wire can become code, an object of any class, or a path; checked in the source.

What is looked for is looked for in every file of services/ and splitppo/, whatever reaches it: a list of what is
reachable would be wrong sooner than the list of exceptions here.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from splitppo.v1 import (
    actor_pb2,
    batch_pb2,
    critic_pb2,
    reference_pb2,
    reward_model_pb2,
    rollout_pb2,
    teacher_pb2,
    worker_pb2,
)

pytestmark = pytest.mark.promise("tls and tokens")

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    file
    for folder in ("services", "splitppo")
    for file in (ROOT / folder).rglob("*.py")
    if not file.name.endswith(("_pb2.py", "_pb2_grpc.py"))
)
GENERATED = sorted((ROOT / "splitppo" / "v1").glob("*_pb2*.py"))

# Modules whose loaders make objects or code out of bytes, or import by name.
UNSAFE_MODULES = frozenset(
    ("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "runpy", "code", "imp")
)
DYNAMIC_IMPORTS = frozenset(("importlib", "pkgutil", "__import__"))
CODE_FROM_TEXT = frozenset(("eval", "exec", "compile"))

# (file, what) -> why it cannot be reached from the wire.
ALLOWED = {
    (
        "splitppo/config/rollout_packages.py",
        "import importlib.metadata",
    ): "reads versions of installed packages; imports none",
    **{
        ("splitppo/config/__init__.py", what): "imports modules of a table in the file, by the names that code asks for"
        for what in ("import importlib.import_module", "import_module")
    },
    **{
        ("splitppo/machine/heavy_imports.py", what): "is called by an import that is under way, and hands it on"
        for what in (
            *(
                f"import importlib.{name}"
                for name in ("abc.MetaPathFinder", "machinery.ModuleSpec", "machinery.PathFinder")
            ),
            "exec_module",
        )
    },
    ("services/runtime/group/forked_ranks.py", "import runpy"): "runs what the command line names, before it serves",
    **{
        ("services/runtime/group/rank_imports.py", what): "imports what the command line names, before ranks are there"
        for what in ("import importlib", "import importlib.util.find_spec", "import_module")
    },
    **{
        ("splitppo/user_file.py", what): "the file is named by the configuration, which no message changes"
        for what in ("import importlib.util", "spec_from_file_location", "exec_module")
    },
}


@dataclass(frozen=True)
class Finding:
    """Something that the wire side does not do."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module or module.name) of every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def names(tree: ast.AST) -> Iterator[tuple[int, str, ast.AST]]:
    """(line, last part, node) of every name and attribute: `f` whether called or handed on, and `x.f`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id, node
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr, node


def unsafe_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for line, module in imports(tree):
        root = module.partition(".")[0]
        if root in UNSAFE_MODULES or root in DYNAMIC_IMPORTS:
            yield line, f"import {module}"
    for line, name, _ in names(tree):
        if name in ("__import__", "import_module", "exec_module", "spec_from_file_location"):
            yield line, name


def code_from_text(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """eval, exec and compile as names that are read; model.eval(), re.compile() and torch.compile() are methods."""
    for line, name, node in names(tree):
        is_read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        if name in CODE_FROM_TEXT and (is_read or _is_of(node, "builtins")):
            yield line, name


def _is_of(node: ast.AST, module: str) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module


def torch_loads(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Loading that may unpickle: anything called torch.load without weights_only=True, and numpy with allow_pickle."""
    safe = {id(call.func) for call in _calls(tree) if _keyword(call, "weights_only") is True}
    for line, name, node in names(tree):
        if name == "load" and _is_of(node, "torch") and id(node) not in safe:
            yield line, "torch.load without weights_only=True"
    for call in _calls(tree):
        for name in ("allow_pickle", "trust_remote_code"):
            if any(keyword.arg == name for keyword in call.keywords) and _keyword(call, name) is not False:
                yield call.lineno, f"{name} that is not False"


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _keyword(call: ast.Call, name: str) -> object:
    values = [keyword.value for keyword in call.keywords if keyword.arg == name]
    return values[0].value if values and isinstance(values[0], ast.Constant) else None


def object_collectives(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """torch.distributed's collectives of objects pickle."""
    for line, name, _ in names(tree):
        if name.endswith(("_object_list", "_object", "_objects")) and name.split("_")[0] in (
            *("broadcast", "scatter", "gather", "all", "send", "recv"),
        ):
            yield line, name


RULES: dict[str, Callable[[ast.AST], Iterator[tuple[int, str]]]] = {
    "nothing unpickles or imports by name": unsafe_imports,
    "no text becomes code": code_from_text,
    "weights are loaded as weights only": torch_loads,
    "no collective of objects": object_collectives,
}


@cache
def parsed(file: Path) -> ast.AST:
    return ast.parse(file.read_text())


def findings(rule: Callable[[ast.AST], Iterator[tuple[int, str]]]) -> list[Finding]:
    found = []
    for file in SOURCES:
        name = str(file.relative_to(ROOT))
        for line, what in rule(parsed(file)):
            found.append(Finding(name, line, what))
    return found


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_the_wire_side_keeps(rule: Callable[[ast.AST], Iterator[tuple[int, str]]]) -> None:
    assert len(SOURCES) > 50
    assert [str(finding) for finding in findings(rule) if (finding.file, finding.what) not in ALLOWED] == []


def test_every_exception_is_still_needed() -> None:
    found = {(finding.file, finding.what) for rule in RULES.values() for finding in findings(rule)}
    assert set(ALLOWED) <= found


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (unsafe_imports, "def f():\n    from pickle import loads"),
        (unsafe_imports, "import importlib.util"),
        (unsafe_imports, "load = __import__"),
        (code_from_text, "run = eval"),
        (code_from_text, "builtins.exec(x)"),
        (torch_loads, "torch.load(path)"),
        (torch_loads, "torch.load(path, weights_only=False)"),
        (torch_loads, "load = torch.load"),
        (torch_loads, "np.load(path, allow_pickle=True)"),
        (torch_loads, "from_pretrained(path, trust_remote_code=flag)"),
        (object_collectives, "dist.broadcast_object_list(x)"),
        (object_collectives, "dist.all_gather_object(x, y)"),
    ],
)
def test_a_rule_finds_what_it_is_for(rule: Callable[[ast.AST], Iterator[tuple[int, str]]], source: str) -> None:
    assert list(rule(ast.parse(source)))


def test_what_is_safe_is_not_found() -> None:
    source = "model.eval(); re.compile(x); torch.compile(m); torch.load(p, weights_only=True); np.load(p)"
    assert [list(rule(ast.parse(source))) for rule in RULES.values()] == [[], [], [], []]


def test_generated_code_imports_nothing_but_protobuf_grpc_and_itself() -> None:
    roots = {
        module.partition(".")[0]
        for file in GENERATED
        if file.suffix == ".py"
        for _, module in imports(ast.parse(file.read_text()))
    }
    assert roots <= {"google", "grpc", "splitppo", "warnings"}


def requests() -> dict[str, Descriptor]:
    """Every message that a caller can send."""
    of_models = (reference_pb2, reward_model_pb2, teacher_pb2)
    files = (actor_pb2, batch_pb2, critic_pb2, *of_models, rollout_pb2, worker_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    assert len(services) >= 3
    return {method.input_type.full_name: method.input_type for service in services for method in service.methods}


# Text that a caller can send: what it is. None is a path; the nonce is checked to be the name of a file.
TEXT_FIELDS = {
    "run_id": "compared",
    "request_id": "compared, at most 256 characters",
    "config_digest": "compared",
    "software_version": "compared, repeated in an error",
    "nonce": "[A-Za-z0-9._-], no leading dot: whether this file is in the run folder",
    "columns": "looked up in a closed set",
    "name": "looked up in a closed set",
    "payload": "numbers of a known dtype",
    "loss_mode": "looked up in a closed set, repeated in an error",
    "phase": "logged, at most 100 characters",
    "manifest_sha256": "compared, repeated in an error",
    "stop": "looked for in what is sampled",
}


def text_fields(message: Descriptor, seen: set[str]) -> Iterator[FieldDescriptor]:
    if message.full_name in seen:
        return
    seen.add(message.full_name)
    for field in message.fields:
        if field.message_type is not None:
            yield from text_fields(field.message_type, seen)
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            yield field


def test_no_request_field_is_a_path() -> None:
    seen: set[str] = set()
    fields = {field.name for request in requests().values() for field in text_fields(request, seen)}
    assert fields == set(TEXT_FIELDS)


def test_a_request_holds_no_message_of_any_type() -> None:
    seen: set[str] = set()
    for request in requests().values():
        list(text_fields(request, seen))
    assert {name for name in seen if not name.startswith("splitppo.v1.")} == set()
