"""Operators cut over the tensor-parallel axis: where a cut is propagated, and the collectives that it takes."""

__all__ = ["apply", "collectives", "propagate"]
