"""Makes the connection to a tracker by the tracker's name; its client package is imported only then."""

from controller.tracking.trackers.protocol import Run, Tracker


def connect(name: str, run: Run, sent_step: int) -> Tracker:
    """Connects to the tracker of this name, and returns the connection; raises the errors of the tracker's client.

    `sent_step` is the last step that the tracker was sent, -1 if none.
    """
    match name:
        case "tensorboard":
            from controller.tracking.trackers.tensorboard_tracker import TensorBoardTracker

            return TensorBoardTracker(run, sent_step)
        case "wandb":
            from controller.tracking.trackers.wandb_tracker import WandbTracker

            return WandbTracker(run)
        case "mlflow":
            from controller.tracking.trackers.mlflow_tracker import MlflowTracker

            return MlflowTracker(run)
        case "swanlab":
            from controller.tracking.trackers.swanlab_tracker import SwanlabTracker

            return SwanlabTracker(run)
        case "trackio":
            from controller.tracking.trackers.trackio_tracker import TrackioTracker

            return TrackioTracker(run)
    raise ValueError(f"unknown tracker {name!r}")
