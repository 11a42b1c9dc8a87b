"""``parallel.operators``: each module over the axis ``tp``, as written, from files, or from the model."""

__all__ = [
    "operator_strategy_file",
    "operators",
    "sharded_operators",
    "strategies_of_layouts",
    "strategy_lookup",
    "strategy_reader",
]
