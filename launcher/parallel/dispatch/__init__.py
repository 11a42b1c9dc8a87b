"""The base of all observers of a running model: dispatch modes, and containers of tensors."""

__all__ = ["modes"]
