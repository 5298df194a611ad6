"""Settings that vLLM cannot sample with are refused before weights are loaded, in one sentence with the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.rollout.vllm_backend.checks import check_model
from splitppo.config import Config
from tests.support import models
from tests.support.fake_services import make_config
from tests.vllm.conftest import WIDE

pytestmark = pytest.mark.vllm


def config_of(tmp_path: Path, description: dict[str, Any] | None = None, **changes: Any) -> Config:
    """A run on a model of which there is nothing but its config.json."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    content = {**models.tiny_config(**WIDE).to_dict(), "architectures": ["Qwen2ForCausalLM"], **(description or {})}
    (folder / "config.json").write_text(json.dumps(content))
    return make_config(tmp_path, rollout__backend="vllm", actor__model=str(folder), **changes)


def test_what_works_is_not_refused(tmp_path: Path) -> None:
    check_model(config_of(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout__temperature": 0.7, "rollout__check_freq": 0},  # nobody compares
        {"rollout__temperature": 1.0, "algorithm__rollout_correction": {"rollout_is": "token"}},
    ],
)
def test_top_p_on_a_gpu_is_not_refused_where_its_log_probs_do_no_harm(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_model(config_of(tmp_path, services__actor={"devices": [0]}, rollout__top_p=0.9, **changes))


@pytest.mark.parametrize(
    ("description", "changes", "sentence"),
    [
        (
            {"architectures": ["NoSuchForCausalLM"]},
            {},
            r"vLLM does not know the model of actor.model \(.*: NoSuchForCausalLM\); set rollout.backend to hf",
        ),
        ({"architectures": None}, {}, "no architecture, model_type 'qwen2'"),
        (
            {"hidden_size": 32},
            {},
            r"actor.model has attention heads of size 8, and vLLM on a CPU computes 32, .* only",
        ),
        (
            {},
            {"rollout__vllm": {"kv_cache_gb": 1e-5}},
            r"rollout.vllm.kv_cache_gb \(1e-05\) must hold one sequence of 516 tokens \(rollout.vllm.max_model_len\),"
            r" which takes .* GiB; raise rollout.vllm.kv_cache_gb",
        ),
        (
            {},
            {"rollout__temperature": 2.5},
            "vLLM takes temperatures of 0 to 2, rollout.temperature is 2.5",
        ),
        (
            {},
            {"evaluation__temperature": 3.0},
            "vLLM takes temperatures of 0 to 2, evaluation.temperature is 3",
        ),
        (
            {},
            {
                "services__actor": {"devices": [0]},
                "rollout__temperature": 0.7,
                "rollout__top_p": 0.9,
            },
            "set rollout.temperature to 1, or rollout.check_freq to 0$",
        ),
        (
            {},
            {
                "services__actor": {"devices": [0]},
                "rollout__temperature": 0.7,
                "rollout__top_p": 0.9,
                "rollout__check_freq": 0,
                "algorithm__rollout_correction": {"rollout_is": "token"},
            },
            "set rollout.temperature to 1, or algorithm.rollout_correction.rollout_is and rollout_rs to null$",
        ),
        (
            {},
            {
                "services__actor": {"devices": [0]},
                "rollout__temperature": 0.7,
                "rollout__top_k": 5,
                "algorithm__rollout_correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
            },
            "rollout.check_freq to 0 and algorithm.rollout_correction.rollout_is and rollout_rs to null$",
        ),
    ],
)
def test_it_is_refused(tmp_path: Path, description: dict[str, Any], changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_model(config_of(tmp_path, description, **changes))
