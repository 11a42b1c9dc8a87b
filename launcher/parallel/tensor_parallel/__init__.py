"""Operators cut over the tensor-parallel axis: where a cut is propagated, which collectives it takes."""

__all__ = ["apply", "collectives", "propagate"]
