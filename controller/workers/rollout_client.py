"""The gRPC client with which the controller calls the rollout group: published weights, and sampling with them."""

from controller.workers.command import CommandReply
from controller.workers.sampler_client import SamplerClient
from splitppo.v1 import rollout_pb2, rollout_pb2_grpc


class RolloutClient(SamplerClient):
    """The controller's gRPC client of the rollout group; `committed_step` is the version that the group holds."""

    role = "rollout"
    role_service = rollout_pb2_grpc.RolloutServiceStub

    async def sync_weights(self, version: int, manifest_sha256: str) -> CommandReply:
        """Makes the group load a published version, whatever version it holds; see rollout.proto for the errors."""
        request = rollout_pb2.SyncWeightsRequest(version=version, manifest_sha256=manifest_sha256)
        return await self._load("SyncWeights", request, version)
