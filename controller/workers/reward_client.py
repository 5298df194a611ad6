"""The client of the reward group, which hosts frozen models alone."""

from controller.workers.client import WorkerClient


class RewardClient(WorkerClient):
    """The client of the reward group. It has only the RPCs of every worker, no checkpoints, and no step."""

    role = "reward"
