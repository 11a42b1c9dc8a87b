"""What all observers of a running model build on: dispatch modes, and containers of tensors."""

__all__ = ["modes", "pytree"]
