"""A release: sdist and wheel, installed into an empty environment and used from another folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from splitppo import __version__
from tests.support.environments import UV, make_environment
from tests.support.groups import PROJECT
from tests.support.verl_launch import BASE

PACKAGES = ("controller", "environments", "recipes", "rewards", "services", "splitppo", "viewer")
ROLES = ("actor", "critic", "reward", "rollout")
RUN = ("run.total_steps=2", "data.train_batch_size=64", "evaluation.test_freq=-1", "evaluation.min_accuracy=0")


@dataclass(frozen=True)
class Installed:
    """An environment that holds a wheel and what its lock names, and nothing of the checkout."""

    venv: Path
    elsewhere: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment in a folder that is not the checkout."""
        path = f"{self.venv / 'bin'}:/usr/bin:/bin"
        environment = {"PATH": path, "HOME": str(self.elsewhere), "OMP_NUM_THREADS": "1"}
        program = str(self.venv / "bin" / command[0])
        return subprocess.run(
            [program, *command[1:]], cwd=self.elsewhere, env=environment, capture_output=True, text=True, check=False
        )

    def python(self, code: str) -> str:
        done = self.run("python", "-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def tracked_files() -> list[str]:
    """Returns the paths in the checkout of all files that git knows, which a release is made from."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (PROJECT / name).is_file()]


def copy_tracked_files(folder: Path) -> None:
    for name in tracked_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PROJECT / name, folder / name)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that is built from it."""
    checkout, dist = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    copy_tracked_files(checkout)
    build = [UV, "build", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(dist)]
    subprocess.run([*build, str(checkout)], capture_output=True, text=True, check=True)
    return dist


@pytest.fixture(scope="module")
def installed(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    venv, elsewhere = tmp_path_factory.mktemp("environment") / "venv", tmp_path_factory.mktemp("elsewhere")
    python = make_environment(venv, "cpu")
    [wheel] = release.glob("*.whl")
    install = [UV, "pip", "install", "--offline", "--no-deps", "--python", str(python), str(wheel)]
    subprocess.run(install, capture_output=True, text=True, check=True)
    return Installed(venv, elsewhere)


def test_the_files_are_called_by_the_version_of_the_code(release: Path) -> None:
    expected = [f"splitppo-{__version__}-py3-none-any.whl", f"splitppo-{__version__}.tar.gz"]
    assert sorted(file.name for file in release.iterdir() if file.suffix != "" and file.name[0] != ".") == expected


def test_nothing_comes_from_the_checkout(installed: Installed) -> None:
    code = "import controller, recipes, rewards, services, splitppo; print(*(m.__file__ for m in (controller, recipes,"
    files = installed.python(code + " rewards, services, splitppo)))").split()
    assert len(files) == 5
    assert all(file.startswith(str(installed.venv)) for file in files)


def test_every_service_and_command_starts(installed: Installed) -> None:
    for role in ROLES:
        done = installed.run("python", "-m", f"services.{role}", "--help")
        assert done.returncode == 0, done.stderr
        assert "--config" in done.stdout
    command, module = installed.run("splitppo", "--help"), installed.run("python", "-m", "controller", "--help")
    assert command.returncode == 0
    assert command.stdout == module.stdout


def test_the_proto_files_and_the_type_marker_are_there(installed: Installed) -> None:
    protos = {file.name for file in (installed.venv / "share/splitppo/proto/splitppo/v1").iterdir()}
    assert protos == {file.name for file in (PROJECT / "proto/splitppo/v1").glob("*.proto")}
    [site_packages] = installed.venv.glob("lib/python*/site-packages")
    for package in PACKAGES:
        assert (site_packages / package / "py.typed").is_file(), package


def test_the_wheel_has_every_file_of_the_packages_also_those_that_are_no_code(installed: Installed) -> None:
    [site_packages] = installed.venv.glob("lib/python*/site-packages")
    tracked = [name for name in tracked_files() if name.partition("/")[0] in PACKAGES]
    assert [name for name in tracked if not (site_packages / name).is_file()] == []
    assert {"answers.bash", "index.html", "cpu.yaml"} <= {Path(name).name for name in tracked}


def test_the_viewer_starts(installed: Installed) -> None:
    help_text = installed.run("python", "-m", "viewer", "--help")
    no_run = installed.run("python", "-m", "viewer", ".")
    assert help_text.returncode == 0, help_text.stderr
    assert no_run.returncode == 2
    assert "no run folder" in no_run.stderr


@pytest.mark.promise("from verl")
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_launch_script_of_verl_is_translated(installed: Installed) -> None:
    """The sandbox that runs the script gets `answers.bash`, which is no code, from the wheel."""
    script = installed.elsewhere / "run.sh"
    script.write_text(
        f"LR=$(echo 5e-6)\npython -m verl.trainer.main_ppo {' '.join(BASE)} actor_rollout_ref.actor.optim.lr=$LR\n"
    )
    done = installed.run("splitppo", "from-verl", "run.sh", "--verl-version", "0.9", "--gpus", "3:1", "-o", "my.yaml")
    assert done.returncode == 0, done.stderr
    translated = yaml.safe_load((installed.elsewhere / "my.yaml").read_text())
    assert translated["actor"]["lr"] == 5e-6
    assert translated["services"]["actor"]["devices"] == [0, 1, 2]


def test_the_first_run_of_a_wheels_user(installed: Installed) -> None:
    """Prepares, checks and trains with no file but those of the wheel, in the folder that the user is in."""
    done = installed.run("python", "-m", "recipes.sort_letters.quickstart", *RUN)
    assert done.returncode == 0, done.stderr
    summary = json.loads((installed.elsewhere / "runs/quickstart/summary.json").read_text())
    assert (summary["global_step"], summary["exit_reason"]) == (2, "completed")
    config = installed.python("from recipes.sort_letters.prepare import RECIPE; print(RECIPE.config_file)")
    checked = installed.run("splitppo", "--config", config, "--check", "run.dir=runs/another")
    assert checked.returncode == 0, checked.stderr
    assert "run: 12 steps" in checked.stdout
