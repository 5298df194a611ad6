"""A model whose memory can be worked out by hand, a run with it, and the terms of the estimate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from controller.memory.estimate import estimate_group
from controller.memory.terms import Terms
from controller.models.shape import ModelShape
from splitppo.config import Config
from tests.support.fake_services import make_config

# Hidden 8, MLP 16, two layers, 4 query and 2 key-value heads of dimension 2, vocabulary 10, tied.
MODEL = ModelShape(
    num_parameters=1000,
    layer_parameters=450,
    root_parameters=100,
    num_layers=2,
    hidden=8,
    intermediate=16,
    attention=8,
    key_values=4,
    vocabulary=10,
    is_gated=True,
    is_tied=True,
    windows=(None, None),
)


def config(tmp_path: Path, **changes: Any) -> Config:
    """2 prompts x 2 samples of 6 + 4 tokens, micro-batches of one row."""
    small = {"data__max_prompt_length": 6, "actor__ppo_micro_batch_size_per_gpu": 1}
    return make_config(tmp_path / "run", **small | {"critic__ppo_micro_batch_size_per_gpu": 1} | changes)


def phases(config: Config, role: Any = "actor", model: ModelShape = MODEL, **more: Any) -> dict[str, Terms]:
    return dict(estimate_group(config, role, model, **more).phases)
