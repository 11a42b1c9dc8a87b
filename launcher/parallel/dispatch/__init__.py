"""What observers of a running model build on: dispatch modes, containers of tensors, halves of a backward."""

__all__ = ["modes", "pytree", "weight_gradient"]
