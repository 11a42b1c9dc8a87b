"""Norms of gradients: the global one, and those of this rank's own samples."""
