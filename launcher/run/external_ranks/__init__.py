"""Ranks that torchrun or srun has started: how they join one run."""

__all__ = ["leader"]
