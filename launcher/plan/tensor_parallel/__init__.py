"""``parallel.operators``: each module over the axis ``tp``, as written, from files, or from the model."""

__all__ = [
    "module_strategies",
    "operator_strategy_file",
    "sharded_operators",
    "strategies_of_layouts",
    "strategy_lookup",
    "strategy_reader",
]
