"""The actor: the policy in training, its frozen reference and the rollout engine, as commands of a service.

Every command runs on every rank at the same time, each with its own rows; the shell gathers what they return.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from services.actor.losses import actor_loss
from services.actor.measurements import memory_metrics
from services.actor.rollout.backends import BACKENDS
from services.actor.rollout.protocol import Cancelled, Sampling
from services.actor.rollout.reporting import ReportingListener
from services.engine.assignment import assign_mini_batches
from services.engine.forward import policy_forward
from services.engine.inference import FrozenModel
from services.engine.row_checks import check_rows
from services.engine.token_metrics import metrics_of_role, token_means
from services.engine.train_engine import TrainEngine
from services.shell.commands import Command, CommandCancelled, Outcome, Report
from services.shell.context import RankContext
from services.shell.sharding import shard_by_mini_batch, shard_by_tokens
from splitppo.batch import Batch, Column
from splitppo.rpc.errors import WrongState
from splitppo.v1 import actor_pb2, worker_pb2


class ActorRole:
    """Behind ActorService; see `services.shell.commands.Role`.

    Raises:
        ValueError: a model cannot be loaded.
    """

    role = worker_pb2.ROLE_ACTOR

    def __init__(self, context: RankContext) -> None:
        config = context.config
        self._config, self._device = config, context.device
        self._loss = actor_loss(config.actor)
        backend = BACKENDS[config.rollout.backend]
        backend.check(config)
        self._policy = TrainEngine(
            config.actor,
            kind="policy",
            seed=config.run.seed,
            max_response_length=config.data.max_response_length,
            device=context.device,
        )
        self._reference = FrozenModel(config.actor, device=context.device) if config.uses_reference else None
        self._forward = policy_forward(config.rollout.temperature)
        self._rollout = backend.build(context, self._policy)
        self._ranks_per_engine = backend.ranks_per_engine(config)
        self._rollout_is_stale = True
        self.num_parameters = self._policy.num_parameters
        self.model = self._policy.architecture

    def commands(self) -> Sequence[Command]:
        """Generate, ComputeLogProbs, Update."""
        return (
            Command(
                "Generate",
                actor_pb2.GenerateRequest,
                self.generate,
                columns=("prompts", "seeds"),
                prepare=self._prepare_generate,
                shard=self._deal_prompts,
                cancellable=True,
            ),
            Command(
                "ComputeLogProbs",
                actor_pb2.ComputeLogProbsRequest,
                self.compute_log_probs,
                columns=("prompts", "responses"),
                prepare=self._prepare_compute_log_probs,
                shard=shard_by_tokens,
            ),
            Command(
                "Update",
                actor_pb2.ActorUpdateRequest,
                self.update,
                columns=("prompts", "responses"),
                optional_columns=(
                    "advantages",
                    "response_mask",
                    "old_log_probs",
                    "ref_log_probs",
                    "rollout_is_weights",
                ),
                prepare=self._prepare_update,
                shard=shard_by_mini_batch,
                commits=True,
            ),
        )

    def generate(self, request: actor_pb2.GenerateRequest, batch: Batch | None, report: Report) -> Outcome:
        """Samples one response per seed of each prompt; rows are ordered by prompt, then sample."""
        assert batch is not None
        metrics = self._update_weights(request.header.base_step)
        assert self._rollout.policy_version is not None
        listener = ReportingListener(batch, report, self._rollout.policy_version)
        try:
            rollout = self._rollout.generate(listener.rows, _sampling(request.sampling), listener)
        except Cancelled as error:
            raise CommandCancelled from error
        return Outcome(columns=listener.columns(rollout), metrics=metrics, policy_version=self._rollout.policy_version)

    def _update_weights(self, version: int) -> dict[str, float]:
        """Renews the rollout engine's weights if they are not the policy's; how long that took, if it was done."""
        if not self._rollout_is_stale and self._rollout.policy_version == version:
            return {}
        started_s = time.perf_counter()
        self._rollout.sync_weights(version)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._rollout_is_stale = False
        return {"timing_s/update_weights": time.perf_counter() - started_s}

    def compute_log_probs(
        self, request: actor_pb2.ComputeLogProbsRequest, batch: Batch | None, progress: Report
    ) -> Outcome:
        """Log-probs of the responses under the policy (old_log_probs) or the reference (ref_log_probs)."""
        assert batch is not None
        self._rollout.sleep()
        if request.model == actor_pb2.POLICY_MODEL_REFERENCE:
            assert self._reference is not None
            computed = self._reference.compute(batch, self._forward, outputs=("log_probs",), progress=progress)
            return Outcome(columns=Batch(batch.num_rows, {"ref_log_probs": computed["log_probs"]}))
        computed = self._policy.compute(batch, self._forward, outputs=("log_probs",), progress=progress)
        return Outcome(columns=Batch(batch.num_rows, {"old_log_probs": computed["log_probs"]}))

    def update(self, request: actor_pb2.ActorUpdateRequest, batch: Batch | None, progress: Report) -> Outcome:
        """One PPO update: all mini-batches of all epochs. In critic warm-up nothing but the step advances."""
        if request.advance_only:
            return Outcome()
        assert batch is not None
        self._rollout.sleep()
        self._rollout_is_stale = True
        metrics = token_means(self._policy.update(batch, self._forward, self._loss, progress=progress))
        if self._config.actor.use_kl_loss:
            metrics["kl_coef"] = self._config.actor.kl_loss_coef
        return Outcome(metrics={**metrics_of_role("actor", metrics), **memory_metrics(self._device)})

    def save_checkpoint(self, directory: Path, service_state: bytes, *, with_hf_model: bool) -> Future[str]:
        """See `Role.save_checkpoint`; the reference and the rollout engine have nothing to save."""
        self._rollout.sleep()
        return self._policy.save(directory, service_state, with_hf_model=with_hf_model)

    def check_checkpoint(self, directory: Path) -> None:
        """See `Role.check_checkpoint`."""
        self._policy.check(directory)

    def load_checkpoint(self, directory: Path | None) -> bytes:
        """See `Role.load_checkpoint`."""
        self._rollout.sleep()
        self._rollout_is_stale = True
        if directory is not None:
            return self._policy.load(directory)
        self._policy.load_initial()
        return b""

    def compute_weights_digest(self) -> str:
        """See `Role.compute_weights_digest`; of the policy."""
        self._rollout.sleep()
        return self._policy.weights_digest()

    def _deal_prompts(self, batch: Batch, num_ranks: int) -> list[NDArray[np.int64]]:
        return deal_prompts(batch, num_ranks, self._ranks_per_engine)

    def _prepare_generate(self, request: actor_pb2.GenerateRequest, batch: Batch) -> Batch:
        sampling = _sampling(request.sampling)
        self._check(batch, room=sampling.max_response_length)
        longest = int(batch["prompts"].lengths.max()) + sampling.max_response_length
        self._rollout.check_request(sampling, longest)
        per_prompt = np.unique(batch["seeds"].lengths)
        if len(per_prompt) != 1 or per_prompt[0] < 1:
            raise ValueError(f"every prompt needs the same number of seeds, at least 1; got {per_prompt.tolist()}")
        if not 0 <= request.num_parts <= batch.num_rows:
            raise ValueError(f"num_parts must be 0 (not streamed) to {batch.num_rows} prompts, got {request.num_parts}")
        if request.num_parts <= 1:
            return batch
        sizes = [len(part) for part in np.array_split(np.arange(batch.num_rows), request.num_parts)]
        groups = np.repeat(np.arange(request.num_parts, dtype=np.int32), sizes)
        return batch.merge(Batch(batch.num_rows, {"groups": Column(groups, np.ones(batch.num_rows, np.int32))}))

    def _prepare_compute_log_probs(self, request: actor_pb2.ComputeLogProbsRequest, batch: Batch) -> Batch:
        if request.model not in (actor_pb2.POLICY_MODEL_POLICY, actor_pb2.POLICY_MODEL_REFERENCE):
            raise ValueError(f"model must be POLICY or REFERENCE, got {request.model}")
        if request.model == actor_pb2.POLICY_MODEL_REFERENCE and self._reference is None:
            raise ValueError("this actor holds no reference: neither algorithm.use_kl_in_reward nor actor.use_kl_loss")
        self._check(batch)
        return batch

    def _prepare_update(self, request: actor_pb2.ActorUpdateRequest, batch: Batch) -> Batch:
        if request.advance_only:
            return batch.take(np.empty(0, np.int64))
        needed = ("advantages", "ref_log_probs") if self._config.actor.use_kl_loss else ("advantages",)
        if missing := [name for name in needed if name not in batch]:
            raise WrongState(f"Update needs {', '.join(missing)}, which the slot lacks")
        self._check(batch)
        actor = self._config.actor
        mini_batch_rows = actor.ppo_mini_batch_size and actor.ppo_mini_batch_size * self._config.rollout.n
        mini_batches = assign_mini_batches(
            batch.num_rows,
            mini_batch_rows,
            actor.ppo_epochs,
            shuffle=actor.shuffle,
            seed=self._config.run.seed,
            step=request.slot.step,
        )
        return batch.merge(Batch(batch.num_rows, {"mini_batches": mini_batches}))

    def _check(self, batch: Batch, room: int = 0) -> None:
        model = self._policy.model.config.get_text_config()
        max_positions = getattr(model, "max_position_embeddings", None)
        check_rows(batch, vocab_size=model.vocab_size, max_positions=max_positions, room=room)


def deal_prompts(batch: Batch, num_ranks: int, ranks_per_engine: int = 1) -> list[NDArray[np.int64]]:
    """Rows of each rank for sampling: equally many, dealt by length, for the time goes into tokens not yet there.

    Of what is streamed, every engine gets a share of each group. Of ranks that share an engine the first has the rows.
    """
    groups = batch["groups"].values if "groups" in batch else np.zeros(batch.num_rows, np.int32)
    order = np.lexsort((-batch["prompts"].lengths, groups))
    num_engines = num_ranks // ranks_per_engine
    empty = [np.empty(0, np.int64)] * (ranks_per_engine - 1)
    return [rows for engine in range(num_engines) for rows in (np.sort(order[engine::num_engines]), *empty)]


def _sampling(params: actor_pb2.SamplingParams) -> Sampling:
    return Sampling(params.temperature, params.top_p, params.top_k, params.max_response_length)
