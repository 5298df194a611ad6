"""The gRPC client with which the controller calls the actor group: sampling, log-probs, updates of the policy."""

from collections.abc import Callable

from controller.workers.client import WorkerClient
from controller.workers.command import CommandReply
from splitppo.config import Config, DataConfig
from splitppo.config.sections.evaluation import EvaluationConfig
from splitppo.config.sections.rollout import RolloutConfig
from splitppo.rpc.errors import Place, WrongPolicy
from splitppo.v1 import actor_pb2, actor_pb2_grpc, batch_pb2, worker_pb2


class ActorClient(WorkerClient):
    """The controller's gRPC client of the actor group; each method calls the RPC of the same name."""

    role = "actor"
    role_service = actor_pb2_grpc.ActorServiceStub

    async def generate(
        self,
        slot: batch_pb2.Slot,
        sampling: actor_pb2.SamplingParams,
        *,
        base_step: int,
        num_parts: int = 1,
        on_part: Callable[[int], None] = lambda _: None,
    ) -> CommandReply:
        """Makes the actor sample responses to a slot's prompts by the slot's seeds; the slot then has a row for each.

        The responses come in `num_parts` parts, in the order in which they end. A part can be fetched, with the column
        `places`, as soon as its last response has ended; the last parts may be empty. `on_part` is called with the
        number of a finished part, from 1, perhaps several times for a part, and perhaps not before this method returns.

        Raises:
            WrongPolicy: the responses were sampled with the weights of another step.
        """

        def check_policy(version: int) -> None:
            if version != base_step:  # the update would take them for on-policy
                sampled = f"the responses were sampled with the weights of step {version}"
                place = Place(role=self.role, step=slot.step, method="Generate")
                raise WrongPolicy(f"{sampled}, expected those of step {base_step}", place)

        def on_ready(part: worker_pb2.PartReady) -> None:
            check_policy(part.policy_version)
            on_part(part.part)

        request = actor_pb2.GenerateRequest(slot=slot, sampling=sampling, num_parts=num_parts if num_parts > 1 else 0)
        reply = await self._command("Generate", request, base_step, on_part=on_ready)
        check_policy(reply.result.policy_version)
        return reply

    async def compute_log_probs(self, slot: batch_pb2.Slot, *, base_step: int) -> CommandReply:
        """Makes the actor add the column old_log_probs, the policy's log-probs of the response tokens, to a slot."""
        return await self._command("ComputeLogProbs", actor_pb2.ComputeLogProbsRequest(slot=slot), base_step)

    async def update(
        self,
        slot: batch_pb2.Slot,
        *,
        base_step: int,
        terms: actor_pb2.LossTerms | None = None,
        advance_only: bool = False,
    ) -> CommandReply:
        """Makes one PPO update of the policy, which commits the slot's step; `advance_only` keeps the weights as is.

        `terms` are the terms of the loss, by default those of the worker's configuration.
        """
        request = actor_pb2.ActorUpdateRequest(slot=slot, advance_only=advance_only, loss_terms=terms)
        return await self._command("Update", request, base_step)


def loss_terms(config: Config) -> actor_pb2.LossTerms:
    """Returns the protobuf message with those terms of the policy loss that may change from step to step."""
    terms = config.actor.model_dump(include={"entropy_coeff", "use_kl_loss", "kl_loss_coef"})
    phases = config.algorithm.phases
    return actor_pb2.LossTerms(
        **terms, loss_mode=config.actor.policy_loss.loss_mode, phase=phases[0].label if phases else ""
    )


def sampling_params(section: RolloutConfig | EvaluationConfig, data: DataConfig) -> actor_pb2.SamplingParams:
    """Returns the protobuf message with temperature, top_p, top_k and response limit for the RPC Generate."""
    drawn = section.model_dump(include={"temperature", "top_p", "top_k"})
    return actor_pb2.SamplingParams(**drawn, max_response_length=data.max_response_length)
