"""The base of all observers of a running model: dispatch modes, containers of tensors, split backwards."""

__all__ = ["modes"]
