"""Moves a tensor from one layout to another by the collectives that send ranks the fewest bytes."""

__all__ = ["direct_exchange", "planned", "step"]
