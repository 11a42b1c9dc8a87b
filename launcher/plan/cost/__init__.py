"""What a plan costs: bytes a rank, collectives a step, and what travels together."""

__all__ = ["fusion", "gather_order", "memory", "room"]
