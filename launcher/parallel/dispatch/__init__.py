"""The base of all observers of a running model: dispatch modes, containers of tensors, meta kernels."""

__all__ = ["modes", "training_mode", "user_lines", "without_dynamo"]
