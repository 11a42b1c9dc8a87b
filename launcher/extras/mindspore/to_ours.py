"""Converts MindSpore's strategies to the launcher's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod

from launcher.checkpoint.foreign.names import kind_of
from launcher.checkpoint.layout.strategy import STAGE, Entry, Strategy
from launcher.checkpoint.tensorfile.safetensors import described
from launcher.extras.mindspore.from_ours import cuts
from launcher.extras.mindspore.match_strategy_dims import collapsed
from launcher.extras.mindspore.strategy import Slicing, StrategyFile
from launcher.plan.values.grid import Grid, RankSpan
from launcher.plan.values.layout import DimSpans, Layout, common_axes, within
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.plan.values.text import many


def full_specs(file: StrategyFile, slices: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Returns the specs of the full tensors, from those of the slices in the ranks' files.

    Raises ``ValueError`` with each parameter that has no slice, or whose slice contradicts the file.
    """
    out = {}
    problems = _absent(file, slices)
    for name, slicing in _flat(file).items():
        if name in slices:
            try:
                out[name] = _full(slicing, slices[name])
            except ValueError as error:
                problems.append(f"{name}: {error}")
    _raise(problems)
    return out


def to_strategy(file: StrategyFile, full: Mapping[str, TensorSpec], stages: int | None = None) -> Strategy:
    """Returns the file's parameters over a grid of stages (``pp``, outermost) and of the axes that they need.

    If no common axes suffice, each layout gets its own grid. ``full`` has the specs of full tensors; names
    that the file does not list are ignored. ``stages`` is the number of stages of the full pipeline if the
    file has a single stage; by default a file of stage 2 alone is the third of three. Raises ``ValueError``
    with everything that does not fit.
    """
    problems = _absent(file, full)
    parts = {name: s for name, s in _flat(file).items() if name in full}
    count = max(file.stages()) + 1 if stages is None else stages
    if count <= max(file.stages()):
        has = f"only {many(count, 'stage')}, {'0' if count == 1 else f'0 to {count - 1}'}"
        problems.append(f"the strategy has stage {max(file.stages())}, but the pipeline has {has}")

    sliced: dict[str, DimSpans] = {}
    for name, slicing in parts.items():
        try:
            sliced[name] = _cuts(slicing, full[name])
        except ValueError as error:
            problems.append(f"{name}: {error}")
    _raise(problems)
    return _strategy(file, full, sliced, count)


def _strategy(
    file: StrategyFile, full: Mapping[str, TensorSpec], sliced: Mapping[str, DimSpans], count: int
) -> Strategy:
    ranks = _ranks(file)
    shared = common_axes(chain.from_iterable(sliced.values()), ranks)
    homes = _homes(file)
    entries = {}
    for name, dims in sliced.items():
        axes = common_axes(dims, ranks) if shared is None else shared
        assert axes is not None, dims  # strides of one device matrix divide each other
        split = tuple(tuple(f"d{i}" for span in dim for i in within(span, axes)) for dim in dims)
        at = ((STAGE, homes[name]),) if len(homes[name]) < count else ()
        layout = Layout(_grid(count, axes), full[name].shape, split, at)
        entries[name] = Entry(layout, full[name].dtype, kind_of(name, homes))
    return Strategy(_grid(count, (RankSpan(1, ranks),) if shared is None else shared), entries)


def _grid(stages: int, axes: Sequence[RankSpan]) -> Grid:
    return Grid(((STAGE, stages), *((f"d{i}", span.size) for i, span in enumerate(axes))))


def _homes(file: StrategyFile) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {}
    for stage, layouts in file.stages().items():
        for name in layouts:
            out[name] = (*out.get(name, ()), stage)
    return out


def _flat(file: StrategyFile) -> dict[str, Slicing]:
    """Returns the layouts by name without the stage.

    Several stages list a tied parameter; raises ``ValueError`` if its layout differs between them.
    """
    out: dict[str, Slicing] = {}
    problems = []
    for stage, layouts in file.stages().items():
        for name, slicing in layouts.items():
            first = out.setdefault(name, slicing)
            if first != slicing and _where(first) != _where(slicing):
                problems.append(
                    f"{name}: stage {stage} cuts it differently from an earlier stage; a tensor must have "
                    "one layout"
                )
    _raise(problems)
    return out


def _where(s: Slicing) -> tuple[object, ...]:
    return s.devices, s.dims, s.shards, s.field, s.split_shape, s.shape


def _ranks(file: StrategyFile) -> int:
    sizes = {s.ranks: name for name, s in file.layouts.items()}
    if len(sizes) > 1:
        listing = ", ".join(f"{n} for {name}" for n, name in sorted(sizes.items()))
        raise ValueError(
            f"device matrices of different sizes: {listing}; all stages must have the same number of ranks"
        )
    return next(iter(sizes), 1)


def _absent(file: StrategyFile, specs: Mapping[str, TensorSpec]) -> list[str]:
    odd = sorted({n for layouts in file.stages().values() for n in layouts if n not in specs})
    return [f"{', '.join(odd)}: in the strategy, but not in the checkpoint"] if odd else []


def _raise(problems: list[str]) -> None:
    if problems:
        raise ValueError("the strategy file does not fit:\n" + "\n".join(f"  {f}" for f in problems))


def _full(s: Slicing, piece: TensorSpec) -> TensorSpec:
    grown = (piece.shape[0] * s.shards, *piece.shape[1:]) if piece.shape else ()
    s = collapsed(s, grown, sliced=True)
    shape = tuple(n * s.count(dim) for dim, n in enumerate(grown))
    if s.shape is not None and s.shape != shape:
        text = f"slices of {described(piece)} make {list(shape)}, but the strategy has {list(s.shape)}"
        raise ValueError(f"{text}; give the files and the strategy of one save")
    return TensorSpec(shape, piece.dtype)


def _cuts(s: Slicing, full: TensorSpec) -> DimSpans:
    if s.field or s.split_shape:
        raise ValueError("it is split by hand (field or param_split_shape), which is not supported")
    s = collapsed(s, full.shape, sliced=False)
    if s.shape is not None and s.shape != full.shape:
        raise ValueError(f"the tensor is {described(full)}, the strategy says {list(s.shape)}")
    dims = cuts(s)
    for dim, (size, spans) in enumerate(zip(full.shape, dims, strict=True)):
        parts = prod(span.size for span in spans)
        if size % parts:
            raise ValueError(f"dim {dim} of {described(full)} does not divide into {parts} parts")
    return dims
