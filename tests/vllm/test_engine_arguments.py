"""The arguments of vLLM's engine on a GPU, as vLLM itself understands them, with its platform patched to an H100."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.rollout.vllm_backend.process import MORE_IN_USE, whatever_is_free
from tests.support.groups import PROJECT
from tests.support.models import save_policy
from tests.vllm.gpu_platform import ERRORS

pytestmark = pytest.mark.vllm

ACTOR_ON_TWO = ("services.actor.num_processes=2", "services.actor.devices=[0, 1]")
CASES: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "fp32": ("actor.dtype=fp32",),
    "two ranks an engine": (*ACTOR_ON_TWO, "rollout.vllm.tensor_model_parallel_size=2"),
    "awake": ("rollout.vllm.sleep_level=0",),
    "eager": ("rollout.vllm.enforce_eager=true",),
    "a cache of 3 GiB": ("rollout.vllm.kv_cache_gb=3",),
    "whole prefills": ("rollout.vllm.enable_chunked_prefill=false", "rollout.vllm.max_num_batched_tokens=64"),
    "top-p": ("rollout.top_p=0.5", "rollout.check_freq=0"),
}
CHANGES: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "torch.float32"},
    "two ranks an engine": {"ranks": 2},
    "awake": {"sleeps": False, "has_pool": False},
    "eager": {"graphs": "NONE"},
    "a cache of 3 GiB": {"kv_cache_bytes": 3 << 30, "share": 0.001},  # vLLM would want the share to be free
    "whole prefills": {"max_num_batched_tokens": 2048},
    "top-p": {"logprobs": "raw_logprobs"},
}


DEFAULTS = {
    "device": "cuda",
    "executor": "external_launcher",
    "ranks": 1,
    "is_stateless": True,
    "sleeps": True,
    "has_pool": True,
    "graphs": "FULL_AND_PIECEWISE",
    "dtype": "torch.bfloat16",
    "head_dtype": "torch.float32",
    "loads": "dummy",
    "logprobs": "processed_logprobs",
    "max_model_len": 2048,
    "max_num_batched_tokens": 8192,
    "prefixes": True,
    "kv_cache_bytes": None,
    "share": 0.5,
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What vLLM makes of each case, and at last what the backend raises for errors of vLLM."""
    folder = tmp_path_factory.mktemp("arguments")
    model = save_policy(folder / "policy", hidden_size=256, num_attention_heads=4, max_position_embeddings=4096)
    config = {
        "run": {"dir": str(folder / "run"), "total_steps": 1},
        "data": {"train_files": "none", "train_batch_size": 8, "max_prompt_length": 512, "max_response_length": 1536},
        "algorithm": {"adv_estimator": "grpo"},
        "actor": {"model": str(model), "dtype": "bf16"},
        "rollout": {"backend": "vllm", "n": 8},
        "services": {"actor": {"devices": [0]}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.gpu_platform", str(folder / "config.yaml")],
        input="".join(f"{json.dumps(overrides)}\n" for overrides in CASES.values()),
        cwd=PROJECT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr[max(0, done.stderr.find("Traceback")) :][:6000]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]


def test_vllm_on_a_gpu_takes_the_arguments_as_they_are_meant(lines: list[Any]) -> None:
    assert lines[0] == DEFAULTS


@pytest.mark.parametrize(("case", "changes"), CHANGES.items(), ids=CHANGES)
def test_each_key_changes_what_it_names_and_nothing_else(lines: list[Any], case: str, changes: dict[str, Any]) -> None:
    assert lines[list(CASES).index(case)] == DEFAULTS | changes


def test_only_what_vllm_refuses_is_a_mistake_in_the_configuration(lines: list[Any]) -> None:
    refused, *failures = lines[-1]
    assert refused == [
        "ValueError",
        "vLLM refuses the rollout (rollout.vllm): Free memory on device cuda:0 (1.0/80.0 GiB) on startup is less than"
        " desired",
    ]
    assert failures == [[type(error).__name__, str(error)] for error in ERRORS[1:]]


def test_an_engine_sleeps_also_while_another_group_takes_memory_of_its_gpu() -> None:
    slept = []

    def sleep(level: int) -> None:
        """The end of vLLM's, on a GPU of which less is free than before."""
        slept.append(level)
        raise AssertionError(MORE_IN_USE if level else "something else")

    whatever_is_free(sleep)(level=2)
    with pytest.raises(AssertionError, match="something else"):
        whatever_is_free(sleep)(level=0)
    assert slept == [2, 0]


def test_vllm_says_of_its_sleep_what_is_left_out() -> None:
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    assert f'"{MORE_IN_USE}"' in (Path(vllm.origin).parent / "v1" / "worker" / "gpu_worker.py").read_text()
