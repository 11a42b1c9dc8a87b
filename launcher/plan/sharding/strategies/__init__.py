"""Reads strategies as users write them, for operators and tensors of a batch; suggests those that fit."""

__all__ = ["known_params", "operator_names"]
