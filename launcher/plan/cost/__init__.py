"""What a plan costs: bytes a rank, collectives a step, and what travels together."""

__all__ = ["device_memory", "fusion", "gather_order", "memory", "memory_curve", "memory_svg"]
