"""The commands of the pages: programs, files, options and keys that they name exist.

What they do is shown elsewhere: `make quickstart` by tests/integration/runs/test_quickstart.py, the recipes of
docs/extending and the pages about small models by tests/integration/extending, the calls of docs/health.md by
tests/integration/foreign, Compose by tests/deployment, Slurm by tests/slurm, and the run of the README by
tests/integration/installing/test_documented_commands.py, which also asks every module for its help.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.support.doc_commands import OVERRIDE, PAGES, ROOT, Command, commands, is_key, unknown_keys, yaml_blocks

COMMANDS = list(commands())
MAKE = sorted({tuple(command.words) for command in COMMANDS if command.words[0] == "make"})
MODULES = [command for command in COMMANDS if command.module is not None and not command.module.startswith("verl")]
# These make files and keys of their own, and a test follows them to the letter.
FOLLOWED = "docs/extending/"
# Modules of others, and what a page only shows as an argument.
FOREIGN = frozenset(("build", "pip", "venv", "pytest"))
OURS = "(?:controller|services|splitppo|recipes|benchmarks|tools|tests)"
PLACEHOLDERS = frozenset(("recipes.NAME.prepare",))
# Names in a page that stand for files of the user.
A_FILE = re.compile(r"(?:^|=)((?:deploy|recipes|requirements|tests|docs|proto|tools|benchmarks)/[\w./-]+\w)$")


def test_there_are_commands_of_every_kind() -> None:
    assert len(COMMANDS) > 200
    assert {command.words[0] for command in COMMANDS} > {"make", "python", "docker", "kubectl", "sbatch", "buf"}


@pytest.mark.parametrize("words", MAKE, ids=" ".join)
def test_make_knows_every_target(words: tuple[str, ...]) -> None:
    environment = {"PATH": os.environ["PATH"]}
    command = ["make", "--dry-run", "PYTHON=python", *words[1:]]
    if "N." in words[-1] or "same-weights" in words:
        command.append("REF=HEAD")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def source_of(module: str) -> str:
    """Returns the source of a module, or of all files of a package, where its options are."""
    spec = find_spec(module)
    assert spec is not None, module
    if spec.submodule_search_locations is None:
        assert spec.origin is not None
        return Path(spec.origin).read_text(encoding="utf-8")
    [folder, *_] = spec.submodule_search_locations
    assert (Path(folder) / "__main__.py").is_file(), module
    return "\n".join(file.read_text(encoding="utf-8") for file in Path(folder).rglob("*.py"))


def source_of_file(module: str) -> str:
    """Returns the source of a module that is a file; of a package nothing."""
    spec = find_spec(module)
    is_file = spec is not None and spec.origin is not None and spec.submodule_search_locations is None
    return Path(str(spec.origin)).read_text(encoding="utf-8") if spec is not None and is_file else ""


@pytest.mark.parametrize("module", sorted({str(command.module) for command in MODULES} - FOREIGN - PLACEHOLDERS))
def test_every_module_runs_and_has_the_options(module: str) -> None:
    source = source_of(module)
    for helper in re.findall(
        r"^from ((?:controller|services|splitppo|recipes|benchmarks|tools|tests)[\w.]*) import", source, re.M
    ):
        spec = find_spec(helper)
        if spec is not None and spec.origin is not None and spec.submodule_search_locations is None:
            source += Path(spec.origin).read_text(encoding="utf-8")
    options = {
        word.partition("=")[0]: command.text
        for command in MODULES
        if command.module == module
        for word in own_arguments(command)
        if re.match(r"--?[a-z]", word)
    }
    assert {option: text for option, text in options.items() if f'"{option}"' not in source} == {}


def own_arguments(command: Command) -> list[str]:
    """The arguments of a module itself, and not those of the module that it runs."""
    arguments = list(command.arguments)
    return arguments[: arguments.index("--exec") + 1] if "--exec" in arguments else arguments


def test_every_file_that_a_command_names_is_there() -> None:
    missing = []
    for command in COMMANDS:
        for word in command.words[1:] if not command.page.startswith(FOLLOWED) else ():
            if found := A_FILE.search(word):
                missing += [(command.page, word)] if not (ROOT / found[1]).exists() else []
            if re.fullmatch(r"compose[\w.]*\.yaml", word):
                missing += [(command.page, word)] if not (ROOT / "deploy/compose" / word).is_file() else []
    assert missing == []


def test_every_key_that_a_page_overrides_is_one() -> None:
    unknown = []
    for page in PAGES:
        if str(page.relative_to(ROOT)).startswith(FOLLOWED):
            continue
        for path in OVERRIDE.findall(page.read_text(encoding="utf-8")):
            if not is_key(path):
                unknown.append((page.name, path))
    assert unknown == []


@pytest.mark.parametrize(("page", "block"), list(yaml_blocks()))
def test_every_block_of_yaml_has_keys_of_the_configuration(page: str, block: str) -> None:
    tree = yaml.safe_load(block)
    assert unknown_keys(tree) == [], page


def test_every_extra_and_profile_is_there() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {extra for found in re.findall(r"splitppo\[([\w,-]+)\]", text) for extra in found.split(",")}
    assert extras - project["optional-dependencies"].keys() == set()
    services = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text(encoding="utf-8"))["services"]
    profiles = {profile for service in services.values() for profile in service.get("profiles", [])}
    assert set(re.findall(r"--profile (\w+)", text)) - profiles == set()


def test_every_call_by_hand_is_of_a_method() -> None:
    protos = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "proto").rglob("*.proto"))
    called = {found for command in COMMANDS for found in re.findall(r"splitppo\.v1\.(\w+)/(\w+)", command.text)}
    assert called
    for service, method in called:
        assert re.search(rf"service {service} {{[^}}]*rpc {method}\(", protos), (service, method)
