"""``parallel.operators``: each module over the axis ``tp``, as written, from files, or from the model."""

__all__ = ["files", "operators", "strategy_reader"]
