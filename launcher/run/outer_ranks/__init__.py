"""A run over ranks that torchrun or srun has started: rank 0 leads, the others follow."""

__all__ = ["leader"]
