"""The part of each tensor that each rank holds: strategies, their files, and arithmetic on boxes."""

__all__ = ["derive_strategy", "shards", "strategy", "strategy_file"]
