"""The gRPC client with which the controller calls the actor group: log-probs, updates and weights of the policy."""

from controller.workers.command import CommandReply
from controller.workers.sampler_client import SamplerClient
from splitppo.config import Config
from splitppo.v1 import actor_pb2, actor_pb2_grpc, batch_pb2


class ActorClient(SamplerClient):
    """The controller's gRPC client of the actor group; each method calls the RPC of the same name."""

    role = "actor"
    role_service = actor_pb2_grpc.ActorServiceStub

    async def publish_weights(self, *, base_step: int, keep_from: int, save_hf_model: bool = False) -> CommandReply:
        """Makes the actor write its weights as files; `manifest_sha256` of the result names exactly this version.

        `keep_from` is the oldest version that stays; `save_hf_model` also keeps the weights as a Hugging Face folder.
        """
        request = actor_pb2.PublishWeightsRequest(keep_from=keep_from, save_hf_model=save_hf_model)
        return await self._command("PublishWeights", request, base_step, step=base_step)

    async def compute_log_probs(self, slot: batch_pb2.Slot, *, base_step: int) -> CommandReply:
        """Makes the actor add the column old_log_probs, the policy's log-probs of the response tokens, to a slot."""
        return await self._command("ComputeLogProbs", actor_pb2.ComputeLogProbsRequest(slot=slot), base_step)

    async def update(
        self,
        slot: batch_pb2.Slot,
        *,
        base_step: int,
        total_steps: int = 0,
        terms: actor_pb2.LossTerms | None = None,
        advance_only: bool = False,
    ) -> CommandReply:
        """Makes one PPO update of the policy, which commits the slot's step; `advance_only` keeps the weights as is.

        `total_steps` is the number of steps of the run, which learning rates may need; 0 says nothing. `terms` are the
        terms of the loss, by default those of the worker's configuration.
        """
        request = actor_pb2.ActorUpdateRequest(
            slot=slot, advance_only=advance_only, loss_terms=terms, total_steps=total_steps
        )
        return await self._command("Update", request, base_step)


def loss_terms(config: Config) -> actor_pb2.LossTerms:
    """Returns the protobuf message with those terms of the policy loss that may change from step to step."""
    terms = config.actor.model_dump(include={"entropy_coeff", "use_kl_loss", "kl_loss_coef"})
    phases = config.algorithm.phases
    teacher = config.teacher
    return actor_pb2.LossTerms(
        **terms,
        loss_mode=config.actor.policy_loss.loss_mode,
        phase=phases[0].label if phases else "",
        teacher_coef=teacher.coef if teacher.is_in_loss else None,
    )
