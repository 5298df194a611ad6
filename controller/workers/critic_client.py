"""The gRPC client with which the controller calls the critic group: values and updates of the value model."""

from controller.workers.client import WorkerClient
from controller.workers.command import CommandReply
from splitppo.v1 import batch_pb2, critic_pb2, critic_pb2_grpc


class CriticClient(WorkerClient):
    """The controller's gRPC client of the critic group; each method calls the RPC of the same name."""

    role = "critic"
    role_service = critic_pb2_grpc.CriticServiceStub

    async def compute_values(self, slot: batch_pb2.Slot, *, base_step: int) -> CommandReply:
        """Makes the critic compute the values of the slot's responses, and add the column values to the slot."""
        return await self._command("ComputeValues", critic_pb2.ComputeValuesRequest(slot=slot), base_step)

    async def update(self, slot: batch_pb2.Slot, *, base_step: int, total_steps: int = 0) -> CommandReply:
        """Makes one update of the value model from the slot's rows, which commits the slot's step.

        `total_steps` is the number of steps of the run, which learning rates may need; 0 says nothing.
        """
        request = critic_pb2.CriticUpdateRequest(slot=slot, total_steps=total_steps)
        return await self._command("Update", request, base_step)
