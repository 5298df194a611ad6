"""The commands of the actor: sample, compute log-probs, update the policy and, if placed here, frozen models.

Every command runs on every rank at the same time; each rank has its own rows, and the results are gathered.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from services.actor.loss_terms import coefficients_of, terms_of
from services.actor.losses.actor_loss import actor_loss
from services.actor.losses.distillation import check_columns, loss_columns
from services.actor.losses.registry import find_policy_loss, try_policy_loss
from services.engine.batching.row_checks import check_one_rotation
from services.engine.checkpoint import HF_FOLDER
from services.engine.device_thread import device_thread
from services.engine.exchange import Publisher, saved_buffers
from services.engine.memory_metrics import memory_metrics
from services.engine.model.forward import policy_forward
from services.engine.model.loading import resolve_folder
from services.engine.token_metrics import MetricLimit
from services.roles import model_check
from services.roles.sharding import shard_by_mini_batch
from services.roles.trained_role import TrainedRole
from services.rollout.backends import BACKENDS, prove_sampling
from services.rollout.generation import Generation, refused_generate
from services.rollout.weight_sync import dtype_of
from services.runtime.command import Command, CommandProgress, Effect, Outcome, Rows
from services.runtime.context import RankContext
from services.runtime.ranks.checkpoint_commands import storage_errors
from splitppo.batch import Batch
from splitppo.config import Config
from splitppo.config.rollout_packages import check_rollout_packages
from splitppo.config.section import RoleName
from splitppo.file_lock import any_lock
from splitppo.images.columns import IMAGE_COLUMNS
from splitppo.rpc.errors import StorageFailed, WrongState
from splitppo.v1 import actor_pb2, worker_pb2

log = logging.getLogger(__name__)

# The columns of an update's result, and the outputs of the policy that they are: of the rows with `recorded` 1.
_RECORDED = {"update_log_probs": "log_probs", "update_entropy": "entropy"}

_NO_GENERATION = "the actor group samples nothing: services.rollout has a group of its own, call that group"


def check_config(config: Config) -> None:
    """Raises ValueError unless each phase's policy loss works, and what samples here is installed."""
    if "actor" in config.sampling_roles:
        check_rollout_packages(config, "actor")
    for phase in config.in_every_phase:
        try_policy_loss(phase.actor)


def check_models(role_name: RoleName, config: Config) -> Iterator[str]:
    """Proves each model of the actor's group, see `roles.model_check`; the policy also samples, if it does so here."""
    also = prove_sampling(config) if role_name in config.sampling_roles else _no_more
    return model_check.check_models(role_name, config, also)


def _no_more(_model: object, _device: torch.device) -> None:
    """Checks nothing."""


class ActorRole(TrainedRole):
    """The actor's role: implements ActorService and the services of frozen models; see `runtime.role.Role`.

    Raises:
        ValueError: a model cannot be loaded, or computes or samples with other log-probs than its own.
    """

    role = worker_pb2.ROLE_ACTOR

    def __init__(self, context: RankContext) -> None:
        """Builds the policy, and what samples with it if this group samples.

        The backend is checked before the model is built, which takes long, and proved with the built model.
        """
        config = context.config
        self._phase = ""
        self._generation: Generation | None = None
        if "actor" in config.sampling_roles:
            BACKENDS[config.rollout.backend].check(config)
        super().__init__(context, config.actor, kind="policy", forward=policy_forward(config.rollout.temperature))
        self._teacher_columns = loss_columns(config.teacher)
        if "actor" in config.sampling_roles:
            BACKENDS[config.rollout.backend].prove(self._engine.gathered, config.actor, context.device)
            self._generation = Generation(context, self._engine)
        self._publisher = Publisher(
            config.weights_folder, self._engine.model, self._engine.whole_weights, dtype_of(config), context.device
        )
        self._source = resolve_folder(config.actor.model)
        self._thread = device_thread("hf_model")
        self._kept: Sequence[Future[str]] = ()

    def commands(self) -> Sequence[Command]:
        """Returns all commands of ActorService, and those of the frozen models."""
        generate = refused_generate(_NO_GENERATION) if self._generation is None else self._generation.command()
        log_probs = Command(
            "ComputeLogProbs",
            actor_pb2.ComputeLogProbsRequest,
            Effect.WRITES_SLOT,
            self.compute_log_probs,
            self.forward_rows(),
        )
        update = Command("Update", actor_pb2.ActorUpdateRequest, Effect.TRAINS, self.update, self._update_rows())
        publish = Command("PublishWeights", actor_pb2.PublishWeightsRequest, Effect.READS, self.publish_weights)
        on_rows = self.commands_of_models(log_probs, update)
        return (generate, *on_rows, publish)

    def _update_rows(self) -> Rows:
        """Describes the rows that Update takes; `_prepare_update` checks which optional columns this update needs."""
        return Rows(
            columns=("prompts", "responses"),
            optional_columns=(
                "segments",
                *IMAGE_COLUMNS,
                "advantages",
                "response_mask",
                "old_log_probs",
                "ref_log_probs",
                "rollout_is_weights",
                "seeds",
                "recorded",
                *self._teacher_columns,
            ),
            prepare=self._prepare_update,
            shard=shard_by_mini_batch,
        )

    def compute_log_probs(
        self, _request: actor_pb2.ComputeLogProbsRequest, batch: Batch, progress: CommandProgress
    ) -> Outcome:
        """Computes the log-probs of response tokens under the current policy, as the column `old_log_probs`."""
        self.make_room()
        started_s = time.perf_counter()
        meter = self._engine.flops_meter
        computed = self._engine.compute(batch, self._forward, outputs=("log_probs",), progress=progress)
        seconds = time.perf_counter() - started_s
        columns = {"old_log_probs": computed["log_probs"]}
        return Outcome(
            columns=Batch(batch.num_rows, columns),
            metrics=meter.utilisation(meter.forward_flops(batch), seconds, "perf/mfu/actor_infer"),
        )

    def update(self, request: actor_pb2.ActorUpdateRequest, batch: Batch, progress: CommandProgress) -> Outcome:
        """Trains the policy on all mini-batches and epochs of one step; on none for `advance_only` (critic warm-up)."""
        if request.advance_only:
            return Outcome()
        self.make_room(weights_change=True)
        config, teacher = terms_of(request, self._context.config)
        coefficients = coefficients_of(config, teacher)
        if request.loss_terms.phase != self._phase:
            self._phase = request.loss_terms.phase
            loss_mode = config.policy_loss.loss_mode
            log.info("step %d: phase %r, loss %s, %s", request.slot.step, self._phase, loss_mode, coefficients)
        stop_above = None if config.target_kl is None else MetricLimit("ppo_kl", config.target_kl)
        loss = actor_loss(config, teacher)
        outputs = tuple(_RECORDED.values()) if "recorded" in batch else ()
        updated = self.train(
            request,
            batch,
            loss,
            progress,
            stop_above=stop_above,
            outputs=outputs,
            keeps_rows=config.policy_loss.looks_at_rows,
        )
        metrics = {**updated.metrics, **memory_metrics(self._context.device), **coefficients}
        if "recorded" not in batch:
            return Outcome(metrics=metrics)
        columns = {column: updated.columns[output] for column, output in _RECORDED.items()}
        return Outcome(columns=Batch(batch.num_rows, columns), metrics=metrics)

    def publish_weights(
        self, request: actor_pb2.PublishWeightsRequest, _rows: None, progress: CommandProgress
    ) -> Outcome:
        """Writes the weights of the committed step for the rollout group; see `Publisher.publish`.

        With `save_hf_model` rank 0 also keeps them as a Hugging Face folder, in the background.
        """
        self.make_room()
        wait(self._kept)  # it reads a version that may be removed now
        started_s = time.perf_counter()
        header = request.header
        published = Future[str]()
        try:
            publisher = replace(self._publisher, folder=self._context.config.weights_folder_of(header.run_id))
            with storage_errors(publisher.folder):
                manifest_sha256 = publisher.publish(header.run_id, header.base_step, request.keep_from, progress)
            if request.save_hf_model and self._context.rank == 0:
                buffers = saved_buffers(self._engine.model)
                published = self._thread.submit(
                    self._save_hf_model, publisher, header.base_step, buffers, manifest_sha256
                )
                self._kept = (published,)
            else:
                published.set_result(manifest_sha256)
        except StorageFailed as error:  # as an answer: the ranks, which have all failed, can go on
            published.set_exception(error)
        return Outcome(metrics={"timing_s/publish": time.perf_counter() - started_s}, durable=published)

    def _save_hf_model(
        self, publisher: Publisher, version: int, buffers: Mapping[str, Tensor], manifest_sha256: str
    ) -> str:
        """Keeps a published version as a Hugging Face folder; returns manifest_sha256, which its reply needs."""
        folder = self._context.config.run.dir / HF_FOLDER / f"global_step_{version}"
        with storage_errors(folder), any_lock(self._context.writer_locks):
            publisher.save_hf_model(version, buffers, self._source, folder)
        log.info("the weights of step %d are kept in %s", version, folder)
        return manifest_sha256

    def make_room(self, *, weights_change: bool = False) -> None:
        if self._generation is not None:
            self._generation.suspend(weights_change=weights_change)

    def _prepare_update(self, request: actor_pb2.ActorUpdateRequest, batch: Batch) -> Batch:
        """Checks the rows of an update on rank 0 and adds what its loss computes of the whole batch beforehand.

        With `advance_only` no row is left, because nothing is trained. Losses that select tokens among all of the batch
        give the column `selected_tokens`.

        Raises:
            WrongState: the slot lacks a column that the loss, the KL or the teacher needs.
        """
        config, teacher = terms_of(request, self._context.config)
        loss = find_policy_loss(config, config.policy_loss.loss_mode)
        if request.advance_only:
            return batch.take(np.empty(0, np.int64))
        of_reference = ("ref_log_probs",) if config.use_kl_loss else ()
        needed = ("advantages", *of_reference, *self._teacher_columns, *loss.prepared_from)
        if missing := [name for name in needed if name not in batch]:
            raise WrongState(f"Update needs {', '.join(missing)}, which the slot lacks")
        batch = self.prepare_update(request, batch)
        if config.policy_loss.looks_at_rows:
            because = f"loss_mode {config.policy_loss.loss_mode} looks at whole rows"
            check_one_rotation(batch, self._engine.model, because)
        if teacher is not None:
            check_columns(batch, teacher, self._engine.model)
        if loss.prepare is None:
            return batch
        return batch.merge(Batch(batch.num_rows, {"selected_tokens": loss.prepare(config, batch)}))
