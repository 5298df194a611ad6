"""The gRPC client of a worker group that samples responses: the actor's group, or a rollout group."""

from collections.abc import Callable, Sequence
from functools import partial

from controller.workers.client import UNARY_TIMEOUT_S, WorkerClient
from controller.workers.command import CommandReply
from splitppo.config import DataConfig
from splitppo.config.sections.evaluation import EvaluationConfig
from splitppo.config.sections.rollout import RolloutConfig
from splitppo.rpc.errors import Place, WrongPolicy
from splitppo.rpc.wire_format import MAX_REQUEST_BYTES, divide
from splitppo.v1 import actor_pb2, batch_pb2, conversation_pb2, worker_pb2


class SamplerClient(WorkerClient):
    """The controller's gRPC client of a group that offers the RPC Generate."""

    async def generate(
        self,
        slot: batch_pb2.Slot,
        sampling: actor_pb2.SamplingParams,
        *,
        base_step: int,
        num_parts: int = 1,
        sleep_after: bool = False,
        on_part: Callable[[int], None] = lambda _: None,
        conversation: conversation_pb2.Conversation | None = None,
        on_turns: Callable[[conversation_pb2.TurnsEnded], None] = lambda _: None,
    ) -> CommandReply:
        """Makes the group sample responses to a slot's prompts by the slot's seeds; the slot then has a row for each.

        The responses come in `num_parts` parts, in the order in which they end. A part can be fetched, with the column
        `places`, as soon as its last response has ended; the last parts may be empty. `on_part` is called with the
        number of a finished part, from 1, perhaps several times for a part, and perhaps not before this method returns.
        With a `conversation`, `on_turns` is called with the turns that have ended, perhaps several times for a turn;
        each turn then needs a reply (`reply`), except the last one of a response. With `sleep_after` the group has
        given back the memory of its devices when this method returns.

        Raises:
            WrongPolicy: the responses were sampled with the weights of another step.
        """

        def check_policy(version: int) -> None:
            if version != base_step:  # the update would take them for on-policy
                sampled = f"the responses were sampled with the weights of step {version}"
                place = Place(role=self.role, step=slot.step, method="Generate")
                raise WrongPolicy(f"{sampled}, expected those of step {base_step}", place)

        def on_event(event: worker_pb2.CommandEvent) -> None:
            if event.HasField("part"):
                check_policy(event.part.policy_version)
                on_part(event.part.part)
            elif event.HasField("turns"):
                on_turns(event.turns)

        request = actor_pb2.GenerateRequest(
            slot=slot,
            sampling=sampling,
            num_parts=num_parts if num_parts > 1 else 0,
            sleep_after=sleep_after,
            conversation=conversation,
        )
        reply = await self._command("Generate", request, base_step, on_event=on_event)
        check_policy(reply.result.policy_version)
        return reply

    async def reply(self, slot: batch_pb2.Slot, replies: Sequence[conversation_pb2.TurnReply]) -> None:
        """Answers turns of the generation with a conversation that runs on a slot; may be called twice for a turn.

        Raises:
            InvalidArgument: one of the replies is impossible.
            WrongState: no such generation is running; it may have ended with these replies, if they had to be sent
                again.
        """
        run_id = self._caller.run_id
        epoch = self._caller.epoch
        header = conversation_pb2.ReplyRequest(run_id=run_id, epoch=epoch, slot=slot)
        for some in divide(replies, MAX_REQUEST_BYTES - header.ByteSize()):
            request = conversation_pb2.ReplyRequest(run_id=run_id, epoch=epoch, slot=slot, replies=some)
            await self._repeat("Reply", slot.step, partial(self._role.Reply, request, timeout=UNARY_TIMEOUT_S))


def sampling_params(section: RolloutConfig | EvaluationConfig, data: DataConfig) -> actor_pb2.SamplingParams:
    """Returns the protobuf message with temperature, top_p, top_k and response limit for the RPC Generate."""
    drawn = section.model_dump(include={"temperature", "top_p", "top_k"})
    return actor_pb2.SamplingParams(**drawn, max_response_length=data.max_response_length)
