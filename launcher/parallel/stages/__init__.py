"""A model cut into pipeline stages: the user's modules under their own names, and the code between them."""

__all__ = ["half_model", "split"]
