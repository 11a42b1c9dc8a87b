"""The memory of a training step: the bytes on each rank at every moment, and whether they fit the device."""

__all__ = [
    "fits_cluster",
    "memory_curves",
    "optimizer_state",
    "rank_loads",
    "rank_memory",
    "walk",
]
