"""Which rank holds which part of a tensor: strategies, their files, and the arithmetic of boxes."""

__all__ = ["canonical", "derived", "strategy", "strategy_file"]
