"""Norms of gradients: the global one, and those of this rank's own samples."""

__all__ = ["grad_norm", "local_grad_norm"]
