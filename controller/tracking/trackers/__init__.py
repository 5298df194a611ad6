"""Trackers: TensorBoard, W&B, MLflow, SwanLab, trackio, fed from the run folder by a process of their own."""
