"""Deferred initialisation: a constructor is recorded on meta tensors, and each rank materialises its own shards."""

__all__ = ["fill", "record", "uninitialized"]
