"""Checkpoints as MindSpore has them: one file a rank, functions of the same names.

Formats are in ``formats``.
"""

__all__ = ["formats", "merge_files", "operator_strategies", "rank_conversion", "strategy_input"]
