"""Bytes of a step: the one walk through it, the loads of each rank, the room on a device."""

__all__ = [
    "fits_cluster",
    "memory_curves",
    "optimizer_state",
    "rank_loads",
    "rank_memory",
    "walk",
]
