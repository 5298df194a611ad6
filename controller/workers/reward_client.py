"""The reward group as the controller calls it: frozen models alone."""

from controller.workers.client import WorkerClient


class RewardClient(WorkerClient):
    """Nothing beside what every worker may host; it has no checkpoints, and is at no step."""

    role = "reward"
