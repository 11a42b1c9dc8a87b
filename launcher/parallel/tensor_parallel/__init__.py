"""Operators cut over the tensor-parallel axis: how cuts propagate, and which collectives they need."""

__all__ = ["apply", "collectives", "propagate"]
