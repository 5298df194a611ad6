"""The rollout engines by name, `rollout.backend`. Nothing else knows which one samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.actor.rollout.hf import HfRollout
from services.actor.rollout.protocol import RolloutBackend
from services.actor.rollout.replica import Replica
from services.actor.rollout.stopping import load_stop_rule
from services.engine.model import resolve_folder
from services.engine.train_engine import TrainEngine
from services.shell.context import RankContext
from splitppo.config import Config


@dataclass(frozen=True)
class Backend:
    """How an engine comes to be.

    Attributes:
        check: before any model is loaded; ValueError: the engine cannot sample what is configured.
        build: once, on every rank together, beside the loaded policy.
        ranks_per_engine: ranks that sample the same rows; the lowest of them is given the rows.
    """

    check: Callable[[Config], None]
    build: Callable[[RankContext, TrainEngine], RolloutBackend]
    ranks_per_engine: Callable[[Config], int]


def _build_hf(context: RankContext, policy: TrainEngine) -> RolloutBackend:
    config = context.config
    return HfRollout(
        policy.gathered,
        stop_rule=load_stop_rule(policy.model, config.data.tokenizer or config.actor.model, config.rollout.stop),
        max_batch_size=config.rollout.max_batch_size,
        device=context.device,
    )


def _check_vllm(config: Config) -> None:
    from services.actor.rollout.vllm_checks import check_model

    check_model(config)


def _build_vllm(context: RankContext, policy: TrainEngine) -> RolloutBackend:
    from services.actor.rollout.vllm import VllmRollout

    config = context.config
    return VllmRollout(
        config,
        model=str(resolve_folder(config.actor.model)),
        weights=policy.whole_weights,
        replica=Replica(context.rank, context.world_size, config.rollout.vllm.tensor_model_parallel_size),
        stop_rule=load_stop_rule(policy.model, config.data.tokenizer or config.actor.model, config.rollout.stop),
        device=context.device,
    )


BACKENDS: Mapping[str, Backend] = {
    "hf": Backend(lambda _: None, _build_hf, lambda _: 1),
    "vllm": Backend(_check_vllm, _build_vllm, lambda config: config.rollout.vllm.tensor_model_parallel_size),
}
