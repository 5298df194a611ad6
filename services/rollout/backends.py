"""Maps values of `rollout.backend` to rollout backends; other modules need not know which backend samples."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.rollout.hf_backend.backend import HfRollout
from services.rollout.protocol import PolicyWeights, RolloutBackend
from services.rollout.stopping import load_stop_rule
from services.runtime.context import RankContext
from splitppo.config import Config


@dataclass(frozen=True)
class Backend:
    """Two functions that check and build a rollout backend; only they import packages that may be missing."""

    check: Callable[[Config], None]  # before any model is loaded; ValueError: it cannot sample what is configured
    build: Callable[[RankContext, PolicyWeights], RolloutBackend]  # on every rank together, beside the loaded policy
    samples_with_policy: bool  # the backend has no copy of the weights: it samples with the model of `PolicyWeights`


def _build_hf(context: RankContext, policy: PolicyWeights) -> RolloutBackend:
    return HfRollout(
        policy.gathered,
        stop_rule=load_stop_rule(policy.model, context.config),
        max_batch_size=context.config.rollout.max_batch_size,
        device=context.device,
    )


def _check_vllm(config: Config) -> None:
    from services.rollout.vllm_backend.checks import check_model

    check_model(config)


def _build_vllm(context: RankContext, policy: PolicyWeights) -> RolloutBackend:
    from services.rollout.vllm_backend.backend import VllmRollout

    return VllmRollout(context, policy, load_stop_rule(policy.model, context.config))


BACKENDS: Mapping[str, Backend] = {
    "hf": Backend(lambda _: None, _build_hf, samples_with_policy=True),
    "vllm": Backend(_check_vllm, _build_vllm, samples_with_policy=False),
}
