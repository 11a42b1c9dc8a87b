"""The collectives of a step: what is sent together, and in which order."""

__all__ = ["buckets_and_gathers", "gather_order"]
