"""The collectives of a step: what is sent together, and in which order."""

__all__ = ["fusion", "gather_order"]
