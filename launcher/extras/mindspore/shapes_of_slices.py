"""Adds the shapes that a strategy of MindSpore omits, from those of slices or of full tensors."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.checkpoint.layout.strategy import Strategy
from launcher.extras.mindspore.strategy_argument import StrategyInput
from launcher.extras.mindspore.to_ours import full_specs, to_strategy
from launcher.plan.values.tensor_spec import TensorSpec


def strategy_with_shapes_of_slices(
    strategy: StrategyInput, slices: Mapping[str, TensorSpec], stages: int | None = None
) -> Strategy:
    """Returns ``strategy`` with the shapes that follow from the ranks' ``slices``.

    ``stages`` is the number of stages of the full pipeline, if known.
    """
    if isinstance(strategy, Strategy):
        return strategy
    return to_strategy(strategy, full_specs(strategy, slices), stages)


def of_full_tensors(strategy: StrategyInput, full: Mapping[str, TensorSpec]) -> Strategy:
    """Returns ``strategy`` with the shapes of full tensors; ``full`` has them under every name and alias."""
    return strategy if isinstance(strategy, Strategy) else to_strategy(strategy, full)
