"""The gRPC client with which the controller calls the reward group, which hosts only frozen models."""

from controller.workers.client import WorkerClient


class RewardClient(WorkerClient):
    """The controller's gRPC client of the reward group, which has neither checkpoints nor a step."""

    role = "reward"
