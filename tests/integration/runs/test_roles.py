"""Which groups a run has, and what the critic's warm-up leaves alone."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.runs import Inputs, started


def digest_of_folder(folder: Path) -> str:
    """sha256 over the sorted parameters of a Hugging Face folder, little-endian fp32 values only."""
    tensors = load_file(folder / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].astype("<f4").tobytes())
    return digest.hexdigest()


def test_grpo_starts_no_critic(config: dict[str, Any], tmp_path: Path) -> None:
    grpo = {**config, "algorithm": {"adv_estimator": "grpo"}}
    with started(grpo, tmp_path / "run", "run.total_steps=1", "run.schedule=overlap") as controller:
        folder = controller.complete()
    assert {process["role"] for process in folder.processes} == {"actor", "controller"}
    assert folder.summary["weights_sha256"]["critic"] is None
    assert folder.summary["overlap"] is None
    assert not list((folder.path / "logs").glob("critic*"))


def test_critic_warm_up_trains_the_critic_only(config: dict[str, Any], inputs: Inputs, tmp_path: Path) -> None:
    with started(config, tmp_path / "run", "critic.warmup_steps=1", "run.stop_after_step=1") as controller:
        digests = controller.complete().summary["weights_sha256"]
    assert digests["actor"] == digest_of_folder(inputs.folder / "policy")
    assert digests["critic"] != digest_of_folder(inputs.folder / "value")
