"""Roles that sample with vLLM, driven on a rank of a test as the runtime would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.rollout.begun_responses import BEGUN_COLUMNS
from services.rollout.hf_backend.backend import HfRollout
from services.rollout.protocol import Sampling
from services.rollout.stopping import load_stop_rule
from services.rollout.streamed_parts import response_rows
from splitppo.batch import Batch
from splitppo.config import Config
from splitppo.v1 import actor_pb2, batch_pb2, conversation_pb2, worker_pb2
from tests.support.conversations import ScriptedReplies, converse, responses_of
from tests.support.roles import RecordedProgress, command_of
from tests.vllm.inputs import lists

LENGTH = 16
_SAMPLED = ("responses", "rollout_log_probs")


@dataclass
class Sampler:
    """A role that samples, on this rank, driven as the runtime would."""

    config: Config
    role: Any
    rank: int
    world_size: int
    device: torch.device
    step: int = 0

    def generate(
        self,
        batch: Batch,
        *,
        report: RecordedProgress | None = None,
        num_parts: int = 0,
        sleep_after: bool = False,
        conversation: conversation_pb2.Conversation | None = None,
        **sampling: Any,
    ) -> tuple[list[int], Batch]:
        """The rows of this rank (of the whole), and prompts, responses and log-probs for them."""
        request = self._request(num_parts=num_parts, sleep_after=sleep_after, conversation=conversation, **sampling)
        command = command_of(self.role, "Generate")
        whole = command.rows.prepare(request, batch)
        rows = command.rows.shard(whole, self.world_size)[self.rank]
        outcome = command.run(request, whole.take(rows), report or RecordedProgress())
        assert outcome.policy_version == self.step
        return rows.tolist(), outcome.columns

    def continued(self, rows: Batch, max_step_tokens: int, **sampling: Any) -> tuple[list[list[int]], list[float], int]:
        """Samples this rank's rows, so many tokens at a time; returns responses, log-probs, and how many were cut.

        Ranks that share an engine call it together, and as often, also those without rows.
        """
        request = self._request(max_step_tokens=max_step_tokens, **sampling)
        run, num_cuts = command_of(self.role, "Generate").run, 0
        tokens, log_probs = [[list[Any]() for _ in range(rows.num_rows)] for _ in BEGUN_COLUMNS]
        pending = np.arange(rows.num_rows)
        for _ in range(-(-LENGTH // max_step_tokens)):
            so_far = zip(BEGUN_COLUMNS, (tokens, log_probs), strict=True)
            begun = Batch.from_rows(**{name: [whole[row] for row in pending] for name, whole in so_far})
            made = run(request, rows.take(pending).merge(begun), RecordedProgress()).columns
            for row, *now in zip(pending, *(made[name].rows() for name in _SAMPLED), strict=True):
                tokens[row], log_probs[row] = (values.tolist() for values in now)
            pending = pending[made["unfinished"].values == 1]
            num_cuts += len(pending)
        return tokens, [value for row in log_probs for value in row], num_cuts

    def _request(self, *, num_parts: int = 0, max_step_tokens: int = 0, **options: Any) -> actor_pb2.GenerateRequest:
        named = {name: options.pop(name) for name in ("sleep_after", "conversation") if name in options}
        params = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_response_length": LENGTH, **options}
        return actor_pb2.GenerateRequest(
            header=worker_pb2.CommandHeader(base_step=self.step),
            slot=batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=self.step + 1),
            sampling=actor_pb2.SamplingParams(**params),
            num_parts=num_parts,
            max_step_tokens=max_step_tokens,
            **named,
        )


class Actor(Sampler):
    """An actor, which can train, and sample with the policy itself."""

    def update(self, batch: Batch) -> None:
        """One step on random advantages."""
        self.step += 1
        slot = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=self.step)
        request = actor_pb2.ActorUpdateRequest(header=worker_pb2.CommandHeader(base_step=self.step - 1), slot=slot)
        command = command_of(self.role, "Update")
        whole = command.rows.prepare(request, batch)
        command.run(request, whole.take(command.rows.shard(whole, self.world_size)[self.rank]), RecordedProgress())

    def log_probs(self, rollouts: Batch) -> np.ndarray[Any, Any]:
        """Returns the log-probs of the policy for this rank's rows."""
        request = actor_pb2.ComputeLogProbsRequest()
        outcome = command_of(self.role, "ComputeLogProbs").run(request, rollouts, RecordedProgress())
        values: np.ndarray[Any, Any] = outcome.columns["old_log_probs"].values
        return values

    def converses(
        self, batch: Batch, rows: list[int], report: ScriptedReplies, max_turn_length: int, **settings: Any
    ) -> Batch:
        """The conversations of the Hugging Face engine from the same prompts, on the policy's own weights. Collective.

        Settings are those of `converse`.
        """
        samples = np.arange(batch["seeds"].values.size).reshape(batch.num_rows, -1)
        chosen = batch.merge(Batch.from_rows(places=list(samples))).take(np.array(rows, np.int64))
        steps = converse(self._policy_engine(), chosen, report, max_turn_length=max_turn_length, **settings)
        return response_rows(responses_of(steps), have_turns=True)

    def by_policy(self, batch: Batch, rows: list[int], **sampling: Any) -> list[list[int]]:
        """The responses of the Hugging Face engine to some prompts, on the policy's own weights. Collective."""
        settings = Sampling(**{"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_response_length": LENGTH, **sampling})
        steps = self._policy_engine().generate(batch.take(np.array(rows, np.int64)), settings, lambda: False)
        return lists(response_rows(response for step in steps for response in step.ended))

    def _policy_engine(self) -> HfRollout:
        policy = self.role._engine
        stop_rule = load_stop_rule(policy.model, self.config)
        engine = HfRollout(policy.gathered, stop_rule=stop_rule, max_batch_size=64, device=self.device)
        engine.sync_weights(self.step)
        return engine
