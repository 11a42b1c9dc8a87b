"""Readers of real data and the order of samples, a pure function of (seed, epoch, index)."""

__all__ = ["checks", "fallback", "model_compatibility", "open", "shuffle", "source", "spec", "vocabulary"]
