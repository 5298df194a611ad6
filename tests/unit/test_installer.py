"""The installer takes the lock for the machine and torch from its index, and compiles bytecode."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.groups import PROJECT
from tools.driver import cuda_version
from tools.install import check_torch, choose_lock, holds, install_locks, is_another_lock, make_venv, remove_installers
from tools.installer import CPU_INDEX, CUDA_INDEX, Installer, pip, pip_config, uv, uv_options

pytestmark = pytest.mark.slow

UV = shutil.which("uv", path=sysconfig.get_path("scripts")) or shutil.which("uv")
CPU_LOCK = "torch==2.13.0\nsmall==1.0\n"
CUDA_LOCK = "torch==2.13.0\nsmall==1.0\nnvidia-small==1.0\n"


def write_wheel(folder: Path, name: str, version: str) -> None:
    """A wheel with one module, which needs nothing; it says what torch says of itself."""
    folder.mkdir(parents=True, exist_ok=True)
    cuda = None if version.endswith("+cpu") else "13.0"
    module, metadata = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{module}.py": f"__version__ = {version!r}\nclass version: cuda = {cuda!r}\n",
        f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{metadata}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{metadata}/RECORD"])
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in {**files, f"{metadata}/RECORD": record}.items():
            wheel.writestr(file, text)


class Index:
    """Package indexes on loopback: `folder`/INDEX/PACKAGE/*.whl at `url`/INDEX; notes what is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        index = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                index.asked.append(self.path)

        handler = functools.partial(Handler, directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def packages_asked_of(self, name: str) -> set[str]:
        return {path.split("/")[2] for path in self.asked if path.startswith(f"/{name}/")}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The only index that pip is configured for, `default`: it has the build of torch that needs CUDA."""
    index = Index(tmp_path / "served")
    for name, version in (("torch", "2.13.0"), ("small", "1.0"), ("nvidia-small", "1.0")):
        write_wheel(index.folder / "default" / name, name, version)
    for name in os.environ:
        if name.startswith(("PIP_", "UV_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/default")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    threading.Thread(target=index.server.serve_forever, daemon=True).start()
    yield index
    index.server.shutdown()
    index.server.server_close()


@pytest.fixture(scope="module")
def empty_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    venv = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    return venv


@pytest.fixture
def venv(empty_venv: Path, tmp_path: Path) -> Path:
    """An environment with pip and nothing else."""
    return Path(shutil.copytree(empty_venv, tmp_path / "venv", symlinks=True))


Installers = Callable[[], list[Installer]]


@pytest.fixture(params=["uv", pytest.param("pip", marks=pytest.mark.extended)])
def installers(request: pytest.FixtureRequest, venv: Path) -> Installers:
    """Makes what installs into `venv`, once the sources are set."""
    if request.param == "uv" and UV is None:
        pytest.skip("uv is not here")
    python = venv / "bin" / "python"
    if request.param == "pip":
        return lambda: [pip(python)]
    return lambda: [uv(Path(str(UV)), python, uv_options(pip_config(python)))]


@pytest.fixture
def locks(tmp_path: Path) -> Path:
    (tmp_path / "cpu.txt").write_text(CPU_LOCK)
    (tmp_path / "cuda.txt").write_text(CUDA_LOCK)
    return tmp_path


def installed(venv: Path) -> dict[str, str]:
    (site_packages,) = venv.glob("lib/python*/site-packages")
    names = (path.stem.split("-") for path in site_packages.glob("*.dist-info"))
    return {name: version for name, version in names if name in {"torch", "small", "nvidia_small"}}


def test_without_configuration_torch_alone_comes_from_pytorchs_cpu_index(
    installers: Installers, venv: Path, index: Index, locks: Path
) -> None:
    write_wheel(index.folder / "cpu" / "torch", "torch", "2.13.0+cpu")
    write_wheel(index.folder / "cpu" / "small", "small", "1.0")
    assert install_locks(installers(), [locks / "cpu.txt"], f"{index.url}/cpu") == [locks / "cpu.txt"]
    assert installed(venv) == {"torch": "2.13.0+cpu", "small": "1.0"}
    assert index.packages_asked_of("cpu") == {"torch"}


def test_a_cpu_wheel_in_a_folder_that_pip_knows_is_taken_and_the_cpu_index_not_asked(
    installers: Installers, venv: Path, index: Index, locks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(locks / "wheels", "torch", "2.13.0+cpu")
    monkeypatch.setenv("PIP_FIND_LINKS", str(locks / "wheels"))
    assert install_locks(installers(), [locks / "cpu.txt"], f"{index.url}/cpu") == [locks / "cpu.txt"]
    assert installed(venv) == {"torch": "2.13.0+cpu", "small": "1.0"}
    assert index.packages_asked_of("cpu") == set()


def test_where_no_cpu_wheel_can_be_had_the_whole_cuda_lock_comes_and_its_size_is_said(
    installers: Installers, venv: Path, index: Index, locks: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nobody = "http://127.0.0.1:9/cpu"
    assert install_locks(installers(), [locks / "cpu.txt"], nobody) == [locks / "cpu.txt", locks / "cuda.txt"]
    assert installed(venv) == {"torch": "2.13.0", "small": "1.0", "nvidia_small": "1.0"}
    assert "which runs without a GPU too, but is about 2.9 GB to download" in capfd.readouterr().out


def test_a_cpu_wheel_that_comes_for_a_lock_for_gpus_is_named_with_what_mends_it(
    installers: Installers,
    venv: Path,
    empty_venv: Path,
    index: Index,
    locks: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_wheel(index.folder / "default" / "torch", "torch", "2.13.0+cpu")
    install_locks(installers(), [locks / "cuda.txt"], None)
    check_torch(venv / "bin" / "python", venv, "cpu")
    for lock in ("cuda", "vllm"):
        with pytest.raises(SystemExit, match=rf"LOCK={lock} wants torch's build for CUDA, and torch 2\.13\.0\+cpu, wh"):
            check_torch(venv / "bin" / "python", venv, lock)
    with pytest.raises(SystemExit, match=rf"Remove {venv} and run this again with PIP_EXTRA_INDEX_URL={CUDA_INDEX},"):
        check_torch(venv / "bin" / "python", venv, "cuda")
    write_wheel(index.folder / "pytorch" / "torch", "torch", "2.13.0+cu130")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{index.url}/pytorch")
    shutil.rmtree(venv)
    shutil.copytree(empty_venv, venv, symlinks=True)
    install_locks(installers(), [locks / "cuda.txt"], None)
    check_torch(venv / "bin" / "python", venv, "cuda")


def test_a_cpu_wheel_that_is_there_is_not_asked_for_again(installers: Installers, index: Index, locks: Path) -> None:
    write_wheel(index.folder / "cpu" / "torch", "torch", "2.13.0+cpu")
    install_locks(installers(), [locks / "cpu.txt"], f"{index.url}/cpu")
    index.asked.clear()
    install_locks(installers(), [locks / "cpu.txt"], f"{index.url}/cpu")
    assert index.packages_asked_of("cpu") == set()


def test_what_is_installed_is_compiled_also_where_python_must_not_write_bytecode(
    installers: Installers, venv: Path, index: Index, locks: Path
) -> None:
    install_locks(installers(), [locks / "cuda.txt"], None)
    assert {path.name.split(".")[0] for path in venv.glob("lib/*/site-packages/__pycache__/*.pyc")} >= {
        "torch",
        "small",
    }


def test_the_environment_of_an_image_keeps_what_was_installed_and_no_installer(venv: Path, locks: Path) -> None:
    write_wheel(locks / "wheels", "small", "1.0")
    wheels = ("--no-index", "--find-links", str(locks / "wheels"))
    assert pip(venv / "bin" / "python").install(*wheels, "small")
    remove_installers(venv / "bin" / "python")
    assert installed(venv) == {"small": "1.0"}
    assert list(venv.glob("lib/*/site-packages/pip")) == []


@pytest.mark.parametrize(
    ("driver", "installed", "lock", "lock_with_vllm"),
    [
        ((13, 0), [], "cuda", "vllm"),
        ((13, 2), ["cpu.txt"], "cuda", "vllm"),
        ((13, 2), ["vllm-cpu.txt"], "vllm", "vllm"),
        (None, [], "cpu", "vllm-cpu"),
        ((12, 8), [], "cpu", "vllm-cpu"),
        (None, ["cuda.txt"], "cuda", "vllm"),
        (None, ["vllm.txt"], "vllm", "vllm"),
        (None, ["vllm-cpu.txt", "dev.txt"], "vllm-cpu", "vllm-cpu"),
        (None, ["cpu.txt", "cuda.txt"], "cpu", "vllm-cpu"),
    ],
    ids=[
        *("a GPU", "a newer driver than the environment", "the same with vLLM", "no GPU", "an old driver"),
        *("made from the lock for GPUs", "with vLLM", "with vLLM for a CPU", "CUDA's torch for want of a CPU wheel"),
    ],
)
def test_auto_takes_the_lock_that_the_machine_runs(
    driver: tuple[int, int] | None, installed: list[str], lock: str, lock_with_vllm: str
) -> None:
    for with_vllm, expected in ((False, lock), (True, lock_with_vllm)):
        assert choose_lock("auto", with_vllm=with_vllm, installed=installed, driver_cuda=lambda: driver) == expected


def test_a_driver_that_is_too_old_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    choose_lock("auto", with_vllm=False, installed=[], driver_cuda=lambda: (12, 8))
    assert capsys.readouterr().out == (
        "the NVIDIA driver here runs CUDA up to 12.8 and LOCK=cuda needs 13.0: taking the lock for a CPU\n"
    )


@pytest.mark.parametrize(
    ("lock", "expected"), [("cpu", "vllm-cpu"), ("cuda", "vllm"), ("vllm-cpu", "vllm-cpu"), ("vllm", "vllm")]
)
def test_a_lock_that_is_named_is_taken_whatever_the_machine_has(lock: str, expected: str) -> None:
    assert choose_lock(lock, with_vllm=False, installed=[], driver_cuda=lambda: (13, 0)) == lock
    assert choose_lock(lock, with_vllm=True, installed=[], driver_cuda=lambda: None) == expected


def test_a_controllers_machine_has_no_vllm() -> None:
    with pytest.raises(SystemExit, match=r"VLLM=1 goes with LOCK=auto, cpu or cuda, not with LOCK=controller"):
        choose_lock("controller", with_vllm=True, installed=[])


def test_a_link_to_an_environment_of_another_lock_is_not_followed(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "kept").touch()
    (tmp_path / "link").symlink_to(there)
    with pytest.raises(SystemExit, match="is a link to an environment that was made from another lock"):
        make_venv(tmp_path / "link", anew=True)
    assert (there / "kept").exists()


@pytest.mark.skipif(shutil.which("cc") is None, reason="a driver of our own needs a C compiler")
@pytest.mark.parametrize(
    ("status", "devices", "version"), [(0, 2, (13, 1)), (0, 0, None), (100, 0, None)], ids=["GPUs", "none", "broken"]
)
def test_the_driver_says_which_cuda_it_runs(
    status: int, devices: int, version: tuple[int, int] | None, tmp_path: Path
) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text(
        f"int cuInit(unsigned flags) {{ return {status}; }}"
        f"int cuDeviceGetCount(int *count) {{ *count = {devices}; return {status}; }}"
        f"int cuDriverGetVersion(int *version) {{ *version = 13010; return 0; }}"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    assert cuda_version(str(library)) == version


def test_a_machine_without_a_driver_runs_no_cuda() -> None:
    assert cuda_version("libcuda-of-nobody.so.1") is None


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


def test_uv_asks_no_index_where_pip_must_not() -> None:
    assert "--no-index" in uv_options(":env:.no-index='1'")
    assert "--no-index" not in uv_options(":env:.no-index='0'")


def test_a_stamp_holds_for_the_same_files_and_for_fewer(tmp_path: Path) -> None:
    stamp = tmp_path / "stamp.json"
    assert not holds(stamp, {"cpu.txt": "1"})
    stamp.write_text('{"cpu.txt": "1", "dev.txt": "2"}')
    assert holds(stamp, {"cpu.txt": "1"})
    assert not holds(stamp, {"cpu.txt": "changed"})
    assert not holds(stamp, {"cuda.txt": "1"})
    assert is_another_lock(stamp, "cuda.txt")


def test_an_environment_with_vllm_is_not_one_without(tmp_path: Path) -> None:
    stamp = tmp_path / "stamp.json"
    stamp.write_text('{"vllm-cpu.txt": "1"}')
    assert is_another_lock(stamp, "cpu.txt")
    assert is_another_lock(stamp, "vllm.txt")
    assert not is_another_lock(stamp, "vllm-cpu.txt")


def test_the_page_takes_the_torch_of_the_locks_from_the_installers_index_before_the_wheel() -> None:
    page = (PROJECT / "docs/installation.md").read_text()
    [torch] = re.findall(r"^torch==.*$", (PROJECT / "requirements/cpu.txt").read_text(), re.MULTILINE)
    worker = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["worker"]
    [needed] = [Requirement(package) for package in worker if package.startswith("torch")]
    assert page.index(f"pip install {torch} --index-url {CPU_INDEX} ") < page.index('pip install "splitppo[worker] @ ')
    assert needed.specifier.contains(f"{torch.removeprefix('torch==')}+cpu")
