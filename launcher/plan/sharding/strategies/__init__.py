"""Strategies as they are written: of operators, and of the tensors of a batch; the nearest that fits."""

__all__ = ["known_params", "operator_names"]
