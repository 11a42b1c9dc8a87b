"""Deferred initialization: a constructor is recorded on meta tensors, each rank makes its own shards."""

__all__ = ["compare_builds", "constructor", "fill", "uninitialized"]
