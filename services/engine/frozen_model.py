"""Loads and runs a model that is not trained: the reference policy or the reward model."""

from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup

from services.engine.compilation import compile_model
from services.engine.forward_proof import prove_forward
from services.engine.inference import compute_columns, micro_batch_limits
from services.engine.model.compiled import only_compiled
from services.engine.model.forward import RESPONSE_METHOD
from services.engine.model.loading import PixelLimits, build_model, fill_model
from services.engine.model.weights import Kind
from services.engine.rest import Rest
from services.engine.strategies.protocol import Strategy
from services.engine.strategies.registry import build_strategy
from splitppo.config import ComputedModelConfig


class FrozenModel:
    """A model for forward passes only, without gradients; the weights have the dtype of the computation.

    `strategy` and `sequence_group` are those of the group's model in training; None in a group that trains nothing. For
    `pixel_limits` see `build_model`.

    Attributes:
        compute: runs forward passes over rows, see `compute_columns`.
        limits: how rows are divided into micro-batches.
        proved: how far the engine's numbers are from those of the model's own forward.
        weights: with param_offload they rest in main memory, see `Rest`.

    Raises:
        ValueError: the model cannot be loaded, or its own forward gives other numbers than the engine's.
    """

    def __init__(
        self,
        config: ComputedModelConfig,
        *,
        kind: Kind = "policy",
        device: torch.device,
        strategy: Strategy | None = None,
        sequence_group: ProcessGroup | None = None,
        pixel_limits: PixelLimits = (None, None),
    ) -> None:
        """Builds, shards and fills the model, compiles it if wanted, and proves its forward pass, in this order.

        The order matters: sharding gives the weights memory, filling their values, which the proof needs.
        """
        strategy = strategy or build_strategy(device)
        dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
        self.model: Any = build_model(
            config.model,
            kind,
            dtype=dtype,
            fp32_head=config.has_fp32_head,
            override_config=config.override_config,
            pixel_limits=pixel_limits,
        )
        self.model.requires_grad_(requires_grad=False)
        self.limits = micro_batch_limits(config, self.model, sequence_group, device)
        strategy.shard(self.model, bf16=False, forward_method=RESPONSE_METHOD)
        fill_model(self.model, config.model, kind)
        self.weights = Rest(self.model.parameters, device, is_on=config.param_offload)
        compute = partial(compute_columns, self.model, strategy, limits=self.limits, device=device)
        self.compute = self.weights.awake()(only_compiled()(compute))
        facts: Any = {"strategy": strategy, "limits": self.limits, "device": device, "dtype": config.dtype}
        with self.weights.awake():
            if config.compile:
                compile_model(self.model, kind, config.model, **facts)
            self.proved = prove_forward(self.model, kind, config.model, is_compiled=config.compile, **facts)
