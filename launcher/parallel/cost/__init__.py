"""What a forward and a backward cost, counted on meta tensors: FLOPs, bytes kept, bytes in use."""

__all__ = ["fused_kernels", "memory_meter", "operations_meter"]
