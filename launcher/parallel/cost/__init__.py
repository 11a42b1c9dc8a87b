"""What a forward and a backward cost, counted on meta tensors: FLOPs, bytes kept, bytes in use."""

__all__ = ["memory_meter", "operations_meter"]
