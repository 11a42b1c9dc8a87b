"""The layouts of strategies without a checkpoint: shapes that no file contains are assumed."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

from launcher.checkpoint.layout.strategy import Strategy, tensor_specs
from launcher.extras.mindspore.shapes_of_slices import of_full_tensors
from launcher.extras.mindspore.strategy import Slicing, StrategyFile
from launcher.extras.mindspore.strategy_argument import StrategyInput
from launcher.plan.values.tensor_spec import TensorSpec


def on_paper(src: StrategyInput, dst: StrategyInput | None) -> tuple[Strategy, Strategy | None]:
    """Returns the layouts of both sides without a checkpoint.

    A shape that no file contains is the smallest that both sides can cut evenly.
    """
    specs: dict[str, TensorSpec] = {}
    for side in (src, dst):
        if isinstance(side, Strategy):
            specs = {**tensor_specs(side), **specs}
    for side in (src, dst):
        if isinstance(side, StrategyFile):
            specs = {**_paper(side, specs), **specs}

    # tensors that neither side has a shape for
    specs |= {n: _both(src, dst, n) for n in specs if _unsized(src, dst, n)}
    before = of_full_tensors(src, specs)
    after = None if dst is None else of_full_tensors(dst, specs)
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
    """Returns true if neither side has a shape for ``name``."""
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
