"""External trackers (TensorBoard, W&B, MLflow, SwanLab, trackio); a separate process feeds them from the run folder."""
