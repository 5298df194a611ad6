"""Maps values of `rollout.backend` to rollout backends; other modules need not know which backend samples."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from services.engine.model.loading import for_generation
from services.rollout.hf_backend.backend import HfRollout
from services.rollout.hf_backend.decoding_proof import prove_decoding
from services.rollout.protocol import PolicyWeights, RolloutBackend
from services.rollout.stopping import StopRule
from services.runtime.context import RankContext
from splitppo.config import ComputedModelConfig, Config

Gathered = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Backend:
    """Two functions that check and build a rollout backend; only they import packages that may be missing."""

    check: Callable[[Config], None]  # before any model is loaded; ValueError: it cannot sample what is configured
    # On every rank together, beside the loaded policy.
    build: Callable[[RankContext, PolicyWeights, StopRule], RolloutBackend]
    samples_with_policy: bool  # the backend has no copy of the weights: it samples with the model of `PolicyWeights`
    # Called on every rank together, with `PolicyWeights.gathered` of a policy that has its weights; ValueError: the
    # backend would sample with other log-probs. Without a proof only the first step of a run compares a backend with
    # the trainer.
    prove: Callable[[Gathered, ComputedModelConfig, torch.device], None] = lambda *_: None


def _build_hf(context: RankContext, policy: PolicyWeights, stop_rule: StopRule) -> RolloutBackend:
    return HfRollout(
        policy.gathered,
        stop_rule=stop_rule,
        max_batch_size=context.config.rollout.max_batch_size,
        device=context.device,
    )


def _prove_hf(gathered: Gathered, config: ComputedModelConfig, device: torch.device) -> None:
    prove_decoding(gathered, config.model, device, config.dtype)


def prove_sampling(config: Config) -> Callable[[Any, torch.device], None]:
    """Returns f(model, device), which raises ValueError if the backend would sample with other log-probs than `model`.

    `model` is whole, not sharded; each call of the lambda prepares it for generation. For a backend without a proof
    (`Backend.prove`) f does nothing.
    """

    def prove(model: Any, device: torch.device) -> None:
        BACKENDS[config.rollout.backend].prove(lambda: for_generation(model), config.actor, device)

    return prove


def maps_memory_of_others(config: Config) -> bool:
    """Returns True if the rollout backend maps GPU memory of other processes, which no block that grows allows.

    The all-reduce of several ranks that share a vLLM engine does so.
    """
    return config.rollout.backend == "vllm" and config.rollout.vllm.tensor_model_parallel_size > 1


def _check_vllm(config: Config) -> None:
    from services.rollout.vllm_backend.checks import check_model

    check_model(config)


def _build_vllm(context: RankContext, policy: PolicyWeights, stop_rule: StopRule) -> RolloutBackend:
    from services.rollout.vllm_backend.backend import VllmRollout

    return VllmRollout(context, policy, stop_rule)


BACKENDS: Mapping[str, Backend] = {
    "hf": Backend(lambda _: None, _build_hf, samples_with_policy=True, prove=_prove_hf),
    "vllm": Backend(_check_vllm, _build_vllm, samples_with_policy=False),
}
