"""What a forward and a backward cost, counted on meta tensors: FLOPs, bytes kept, bytes in use."""

__all__ = ["kernels", "memory"]
