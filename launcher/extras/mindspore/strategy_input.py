"""Opens the strategy argument of a function: our file, or MindSpore's, which may have no shapes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from math import lcm
from typing import TypeVar

from launcher.checkpoint.layout.strategy import Strategy, whole_specs
from launcher.extras.mindspore.strategy import Slicing, StrategyFile
from launcher.extras.mindspore.to_ours import full_specs, to_strategy
from launcher.plan.values.tensor_spec import TensorSpec

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

    It is one if its strategy is MindSpore's file of one stage and the destination lists more tensors than the
    stage has. ``files`` has the names in each rank's file, those that no strategy lists included.
    """
    if not isinstance(src, StrategyFile) or not isinstance(dst, StrategyFile) or src.merged:
        return None
    ranks = next((slicing.ranks for slicing in src.layouts.values()), 1)
    stage = range(src.stage * ranks, (src.stage + 1) * ranks)
    own = {name for rank, names in files.items() if rank in stage for name in names}
    return src.stage if listed(src) < listed(dst) and not listed(dst) <= own else None


def of_slices(
    strategy: StrategyInput, slices: Mapping[str, TensorSpec], stages: int | None = None
) -> Strategy:
    """Returns ``strategy`` with the shapes that follow from the ranks' ``slices``.

    ``stages`` is the number of stages of the full pipeline, if known.
    """
    if isinstance(strategy, Strategy):
        return strategy
    return to_strategy(strategy, full_specs(strategy, slices), stages)


def of_whole(strategy: StrategyInput, full: Mapping[str, TensorSpec]) -> Strategy:
    """Returns ``strategy`` with the shapes of full tensors, which ``full`` has by every name and alias."""
    return strategy if isinstance(strategy, Strategy) else to_strategy(strategy, full)


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


def on_paper(src: StrategyInput, dst: StrategyInput | None) -> tuple[Strategy, Strategy | None]:
    """Returns the layouts of both sides without a checkpoint.

    A shape that no file contains is the smallest that both sides can cut evenly.
    """
    specs: dict[str, TensorSpec] = {}
    for side in (src, dst):
        if isinstance(side, Strategy):
            specs = {**whole_specs(side), **specs}
    for side in (src, dst):
        if isinstance(side, StrategyFile):
            specs = {**_paper(side, specs), **specs}

    # tensors that neither side has a shape for
    specs |= {n: _both(src, dst, n) for n in specs if _unsized(src, dst, n)}
    before = of_whole(src, specs)
    after = None if dst is None else of_whole(dst, specs)
    return before, after


def _paper(file: StrategyFile, known: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    out = {}
    for layouts in file.stages().values():
        for name, s in layouts.items():
            if name not in known:
                shape = s.shape or tuple(s.count(dim) for dim in range(len(s.dims)))
                out[name] = TensorSpec(shape, "float32")
    return out


def _unsized(src: StrategyInput, dst: StrategyInput | None, name: str) -> bool:
    """Whether neither side has a shape for ``name``."""
    sides = [side for side in (src, dst) if side is not None]
    files = [side for side in sides if isinstance(side, StrategyFile)]
    if len(files) < len(sides):
        return False
    return all(s.shape is None for file in files for s in _slicings(file, name))


def _slicings(file: StrategyFile, name: str) -> list[Slicing]:
    return [layouts[name] for layouts in file.stages().values() if name in layouts]


def _both(src: StrategyInput, dst: StrategyInput | None, name: str) -> TensorSpec:
    slicings = [s for side in (src, dst) if isinstance(side, StrategyFile) for s in _slicings(side, name)]
    dims = len(slicings[0].dims)
    if any(len(s.dims) != dims for s in slicings):
        raise ValueError(f"{name}: {dims} dims in one strategy, {len(slicings[-1].dims)} in the other")
    return TensorSpec(tuple(lcm(*(_parts(s, dim) for s in slicings)) for dim in range(dims)), "float32")


def _parts(s: Slicing, dim: int) -> int:
    """Returns the number of parts that ``s`` cuts ``dim`` into, optimizer sharding included."""
    return s.count(dim) * s.shards if dim == 0 else s.count(dim)
