"""Which rank holds which part of a tensor: strategies, their files, and the arithmetic of boxes."""

__all__ = ["derived", "shards", "strategy", "strategy_file"]
