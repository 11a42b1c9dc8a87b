"""The strategy argument of functions: ours, or MindSpore's, which may have no shapes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TypeVar

from launcher.checkpoint.layout.strategy import Strategy
from launcher.extras.mindspore.strategy import StrategyFile

Path_ = str | os.PathLike[str] | None
StrategyInput = Strategy | StrategyFile


def listed(strategy: StrategyInput | None) -> set[str]:
    """Returns every name in ``strategy``."""
    if strategy is None:
        return set()
    if isinstance(strategy, Strategy):
        return {*strategy.named}
    return {name for layouts in strategy.stages().values() for name in layouts}


def by_stage(
    src: StrategyInput | None, dst: StrategyInput | None, files: Mapping[int, Collection[str]]
) -> int | None:
    """Returns the source's stage if the source is one pipeline stage of several, else ``None``.

    This is so if its strategy is MindSpore's file of one stage, and the destination lists more tensors than
    the stage has. ``files`` has the names in each rank's file, including names that no strategy lists.
    """
    if not isinstance(src, StrategyFile) or not isinstance(dst, StrategyFile) or src.merged:
        return None
    ranks = next((slicing.ranks for slicing in src.layouts.values()), 1)
    stage = range(src.stage * ranks, (src.stage + 1) * ranks)
    own = {name for rank, names in files.items() if rank in stage for name in names}
    return src.stage if listed(src) < listed(dst) and not listed(dst) <= own else None


Some = TypeVar("Some", Strategy | StrategyFile, Strategy | StrategyFile | None)


def only_names(strategy: Some, names: Collection[str]) -> Some:
    """Returns MindSpore's strategy with only these names. Ours is returned unchanged, since it has shapes."""
    if not isinstance(strategy, StrategyFile):
        return strategy
    numbered = len(strategy.stages()) > 1 or strategy.merged  # ``1-embed.w`` is ``embed.w`` of stage 1

    def plain(name: str) -> str:
        return name.partition("-")[2] if numbered else name

    kept = {name: slicing for name, slicing in strategy.layouts.items() if plain(name) in names}
    return StrategyFile(strategy.counter, strategy.operators, kept)
