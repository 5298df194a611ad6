"""Groups of ranks that sample with vLLM, started once and shared by the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import models
from tests.support.groups import PROJECT
from tests.support.vision_models import FAMILIES, save_vision_policy

TIMEOUT_S = 240.0
# vLLM's attention on a CPU wants heads of 32 or more.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512}

Found = list[dict[str, Any]]


@dataclass(frozen=True)
class Groups:
    """Runs tests/vllm/worker.py in a torchrun group, on the CPU or on a GPU for each rank; a request is run once."""

    folder: Path
    results: dict[str, Found]
    on_gpus: bool = False

    def run(
        self,
        name: str,
        *scenarios: str,
        world_size: int = 1,
        model: str = "qwen2",
        stop: tuple[str, ...] = (),
        actor: str = "",
        share: float | None = None,
        lora_rank: int = 0,
        dtype: str = "fp32",
        **vllm: Any,
    ) -> Found:
        """Returns the results of each rank. `stop`: texts that end a response; `vllm`: keys of rollout.vllm.

        With `actor`, the name of a run that has published weights, the ranks are a rollout group. With `share`, the
        groups of an actor and of rollouts sample.
        """
        if name not in self.results:
            rollout: dict[str, Any] = {"backend": "vllm", "stop": list(stop), "vllm": {"kv_cache_gb": 0.1, **vllm}}
            if "contexts" in scenarios:  # turns may have texts that end them
                rollout["multi_turn"] = {"environments": {"default": {"tools": ["unused.py:tool"]}}}
            role = "rollout" if actor else "actor"
            devices = list(range(world_size)) if self.on_gpus else []
            services = {role: {"num_processes": world_size, "devices": devices}}
            if share is not None:
                rollout["share"] = share
                services.setdefault("rollout", {})
            run = {"dir": str(self._run_dir(actor or name)), "total_steps": 1}
            trained = {"lora_rank": lora_rank, "lr": 3e-2 if lora_rank else 3e-3, "dtype": dtype}
            if model in FAMILIES:
                trained["freeze_vision_tower"] = False
            tree = {"run": run, "rollout": rollout, "services": services, "actor": trained}
            self.results[name] = self._run(name, (role, *scenarios), world_size, model, tree)
        return self.results[name]

    def model(self, name: str) -> Path:
        """A random model with tied (qwen2, and those that read images) or separate embeddings (llama, with experts)."""
        folder = self.folder / name
        if not folder.exists():
            _save_model(name, folder)
        return folder

    def _run_dir(self, name: str) -> Path:
        return self.folder / f"run_{name}"

    def _run(self, name: str, arguments: tuple[str, ...], world_size: int, model: str, tree: dict[str, Any]) -> Found:
        folder = self._run_dir(name)
        folder.mkdir()
        config = {
            **tree,
            "data": {"train_files": "none", "train_batch_size": 8, "max_prompt_length": 330, "max_response_length": 16},
            "actor": {**tree["actor"], "model": str(self.model(model))},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        command = [
            *(sys.executable, "-m", "services.runtime.group.torchrun", "--nproc-per-node", str(world_size)),
            *("-m", "tests.vllm.worker", str(folder), *arguments),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({} if self.on_gpus else {"CUDA_VISIBLE_DEVICES": ""})
        done = subprocess.run(
            command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stderr[max(0, done.stderr.find("Traceback")) :][:6000]
        return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(world_size)]


def _save_model(name: str, folder: Path) -> None:
    if name == "qwen2":
        models.save_policy(folder, **WIDE)
        return
    if name in FAMILIES:
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
        save_vision_policy(
            folder,
            name,
            vision={"out_hidden_size": WIDE["hidden_size"]},
            head_dim=32,
            rope_parameters=rope | ({"mrope_interleaved": True} if name == "qwen3_vl" else {}),
            **WIDE,
        )
        return
    if name in ("qwen3_moe", "mixtral", "glm4_moe"):
        models.save_experts(folder, name, **WIDE)
        return
    config = models.of_transformers("LlamaConfig")(
        vocab_size=len(models.VOCABULARY),
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        pad_token_id=models.PAD,
        eos_token_id=models.EOS,
        bos_token_id=None,
        **WIDE,
    )
    models.save_random(models.of_transformers("LlamaForCausalLM"), config, folder)


@pytest.fixture(scope="session")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Groups:
    return Groups(tmp_path_factory.mktemp("vllm"), {})


@pytest.fixture
def alone(groups: Groups) -> Callable[[str], dict[str, Any]]:
    """Returns the results of a scenario on one rank with an engine of its own."""
    names = (
        *("random_state", "replay", "greedy", "skipped_sync", "prefixes", "sampling", "streaming", "cancellation"),
        *("conversations", "contexts", "cuts", "published"),
    )

    def find(scenario: str) -> dict[str, Any]:
        found: dict[str, Any] = groups.run("alone", *names, max_num_seqs=64)[0][scenario]
        return found

    return find


@pytest.fixture
def replicas(groups: Groups) -> Found:
    """Two ranks, each with an engine of its own, which decodes few responses together.

    Their caches have ten blocks of 128 tokens: eight longer responses do not fit, and vLLM begins some of them anew.
    """
    scenarios = ("replay", "greedy", "streaming", "cancellation", "conversations")
    return groups.run("replicas", *scenarios, world_size=2, max_num_seqs=8, kv_cache_gb=0.0013)


@pytest.fixture
def shared_engine(groups: Groups) -> Found:
    """Two ranks that share an engine (tensor-parallel), on a model with an output layer of its own; texts end
    responses.
    """
    return groups.run(
        "shared_engine",
        *("greedy", "streaming", "cancellation", "stop_texts", "conversations", "contexts", "cuts"),
        world_size=2,
        model="llama",
        stop=("ab", "q", "7"),
        tensor_model_parallel_size=2,
    )


@pytest.fixture
def replicas_of_two(groups: Groups) -> Found:
    """Four ranks, two of which share an engine each."""
    scenarios = ("greedy", "streaming", "cancellation", "conversations")
    return groups.run("replicas_of_two", *scenarios, world_size=4, tensor_model_parallel_size=2)
