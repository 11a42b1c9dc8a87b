"""Sends metrics to TensorBoard, W&B, MLflow, Trackio or a user's class, from a child process."""
