"""Gives a rollout backend the policy's weights from published files, version by version (the command SyncWeights)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from services.engine import parallel
from services.engine.exchange import PublishedWeights, saved_buffers
from services.engine.model.freezing import freeze_weights
from services.engine.model.loading import build_model, fill_model, set_attention
from services.runtime.context import RankContext
from services.runtime.ranks.checkpoint_commands import storage_errors
from splitppo.config import Config
from splitppo.rpc.errors import NotFound
from splitppo.v1 import rollout_pb2


class SyncedWeights:
    """The policy of a rollout group as its backend sees it (`PolicyWeights`), with the weights of one version.

    A backend that samples with a model of its own gets the weights from the version's files. For the backend that
    samples with this model (`holds_copy`), every rank has a whole copy. The files of the version stay open: a backend
    that has dropped its weights gets them again from there.

    Raises:
        ValueError: the model cannot be built.
    """

    def __init__(self, context: RankContext, *, holds_copy: bool) -> None:
        """Builds the policy: with memory for its weights if it `holds_copy`, else on the meta device.

        A version's files give the values later. Buffers, which no version has, are those of the model's folder.
        """
        config = context.config
        self._config = config
        self._device = context.device
        self._dtype = dtype_of(config)
        self._holds_copy = holds_copy
        # One rank per machine verifies the files, since storage may show each machine something else. The variable is
        # read here, because vLLM sets it to something else later.
        self._is_first_on_machine = os.environ.get("LOCAL_RANK", "0") == "0"
        self._checked: PublishedWeights | None = None
        self._published: PublishedWeights | None = None
        actor = config.actor
        # `requires_grad` is that of the actor's model, though no gradient is computed: without it torch computes some
        # products in another way, and log-probs would differ from the actor's (docs/adr/050).
        self.model: Any = build_model(
            actor.model,
            "policy",
            dtype=self._dtype,
            fp32_head=actor.has_fp32_head,
            override_config=actor.override_config,
            pixel_limits=config.data.pixel_limits,
        )
        self.num_parameters: int = self.model.num_parameters()
        if not actor.lora_rank:
            freeze_weights(self.model, actor, "policy")
        if holds_copy:
            parallel.materialise(self.model, context.device)
        if saved_buffers(self.model):  # published versions have no buffers, only the model's folder has
            fill_model(self.model, actor.model, "policy")
        if holds_copy:
            set_attention(self.model, generation=True)

    def check(self, request: rollout_pb2.SyncWeightsRequest) -> None:
        """Opens and verifies the version that a request names, on rank 0, before any rank is told.

        Raises:
            NotFound: the version is not there.
            DamagedCheckpoint: its files are not as they were published.
            StorageFailed: they cannot be read.
            ValueError: it is of another run, model or dtype.
        """
        self._checked = self._open(request)

    def load(self, request: rollout_pb2.SyncWeightsRequest) -> None:
        """Takes over the weights of a version that `check` has accepted; every rank calls it."""
        self._published = self._checked or self._open(request)
        self._checked = None
        if self._holds_copy:
            with torch.no_grad():
                for name, weight in self._published.weights():
                    self.model.get_parameter(name).copy_(weight)

    @contextmanager
    def gathered(self) -> Iterator[Any]:
        """Gives a `with` block the model with whole weights; see `PolicyWeights`."""
        yield self.model.to(self._device)

    def rest(self) -> None:
        """Moves the whole copy, if there is one on a GPU, to main memory until it is sampled with again."""
        if self._holds_copy and self._device.type == "cuda":
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def whole_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and values of each weight of the version; see `PolicyWeights`."""
        assert self._published is not None, "Generate needs a version"
        return ((name, weight.to(dtype)) for name, weight in self._published.weights())

    def _open(self, request: rollout_pb2.SyncWeightsRequest) -> PublishedWeights:
        """Opens a version of weights and checks that it is whole, of this run, and fits this model.

        The digests of all values are compared by one rank per machine only, since ranks of a machine read the same
        files.

        Raises:
            NotFound: there is no such version.
        """
        folder = self._config.weights_folder_of(request.header.run_id)
        with storage_errors(folder):
            try:
                published = PublishedWeights.open(folder, request.version, request.manifest_sha256)
                published.check(request.header.run_id, self.model, self._dtype)
                if self._is_first_on_machine:
                    published.verify()
            except FileNotFoundError as error:
                raise NotFound(str(error)) from error
        return published


def dtype_of(config: Config) -> torch.dtype:
    """Returns the dtype in which the policy is published and sampled with."""
    return torch.bfloat16 if config.actor.dtype == "bf16" else torch.float32
