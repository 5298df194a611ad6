"""The locks agree with pyproject.toml and with each other; the installer asks where pip would look."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.install import holds, is_another_lock, uv_options

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize(
    ("locks", "requirements"),
    [
        (["controller.txt"], PROJECT["dependencies"]),
        (["cpu.txt"], PROJECT["dependencies"] + EXTRAS["worker"]),
        (["cuda.txt"], PROJECT["dependencies"] + EXTRAS["worker"]),
        (["cpu.txt", "dev.txt"], PROJECT["dependencies"] + EXTRAS["worker"] + EXTRAS["dev"]),
    ],
)
def test_a_lock_pins_what_the_project_asks_for(locks: list[str], requirements: list[str]) -> None:
    locked = {name: version for lock in locks for name, version in pins(lock).items()}
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        assert requirement.specifier.contains(locked[name]), f"{requirement}: {locks} has {locked[name]}; run make lock"


def test_every_line_of_a_lock_is_a_comment_or_an_exact_public_version() -> None:
    for file in (ROOT / "requirements").glob("*.txt"):
        for line in file.read_text().splitlines():
            assert re.fullmatch(r"#.*|[a-z0-9-]+==[0-9][a-z0-9.]*", line), f"{file.name}: {line!r}"


def test_the_cpu_lock_is_the_cuda_lock_without_cuda() -> None:
    cpu, cuda = pins("cpu.txt"), pins("cuda.txt")
    assert cpu.items() <= cuda.items()
    assert {name.split("-")[0] for name in cuda.keys() - cpu.keys()} == {"cuda", "nvidia", "triton"}


def test_a_controllers_machine_has_no_torch_and_no_other_versions() -> None:
    controller = pins("controller.txt")
    assert controller.keys().isdisjoint({"torch", "transformers"})
    assert controller.items() <= pins("cpu.txt").items()


def test_development_tools_move_no_package() -> None:
    assert pins("dev.txt").keys().isdisjoint(pins("cuda.txt"))


def test_the_locks_keep_the_versions_that_vllm_needs() -> None:
    constraints, cuda = pins("constraints.txt"), pins("cuda.txt")
    assert {name: cuda[name] for name in constraints} == constraints


def test_uv_looks_where_pip_looks_and_the_environment_outweighs_files() -> None:
    pip_config = "\n".join(
        [
            ":env:.extra-index-url='https://here.example/simple'",
            ":env:.disable-pip-version-check='1'",
            "global.extra-index-url='file:///there\\nfile:///elsewhere'",
            "global.find-links='/wheels'",
            "global.index-url='https://main.example/simple'",
        ]
    )
    assert uv_options(pip_config)[2:] == [
        *("--default-index", "https://main.example/simple"),
        *("--index", "https://here.example/simple"),
        *("--find-links", "/wheels"),
    ]


def test_a_stamp_holds_for_the_same_files_and_for_fewer(tmp_path: Path) -> None:
    stamp = tmp_path / "stamp.json"
    assert not holds(stamp, {"cpu.txt": "1"})
    stamp.write_text('{"cpu.txt": "1", "dev.txt": "2"}')
    assert holds(stamp, {"cpu.txt": "1"})
    assert not holds(stamp, {"cpu.txt": "changed"})
    assert not holds(stamp, {"cuda.txt": "1"})
    assert is_another_lock(stamp, "cuda.txt")
