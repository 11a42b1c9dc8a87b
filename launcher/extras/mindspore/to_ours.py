"""Converts MindSpore's strategies to the launcher's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, pairwise
from math import prod

from launcher.checkpoint.foreign.names import kind_of
from launcher.checkpoint.layout.strategy import STAGE, Entry, Strategy
from launcher.checkpoint.tensorfile.safetensors import described
from launcher.extras.mindspore.from_ours import cuts
from launcher.extras.mindspore.strategy import Slicing, StrategyFile
from launcher.plan.values.grid import Grid, RankSpan
from launcher.plan.values.layout import DimSpans, Layout, common_axes, within
from launcher.plan.values.tensor_spec import TensorSpec


def collapsed(s: Slicing, shape: tuple[int, ...], *, sliced: bool) -> Slicing:
    """Returns the layout in the dims of the real tensor, from one that has a dim per axis.

    ``shape`` is the tensor's shape or, if ``sliced``, that of one slice. Raises ``ValueError`` unless there
    is exactly one way.

    >>> collapsed(Slicing((2, 2), ((), (1,), (0,)), shape=(16, 2, 16)), (16, 32), sliced=False).dims
    ((), (1, 0))
    """
    if len(s.dims) == len(shape):
        return s
    ways = []
    if s.shape is not None and len(s.shape) == len(s.dims):
        ways = list(_ways(s, shape, sliced))
    if len(ways) == 1:
        return ways[0]
    problem = "in more than one way" if ways else "in no way"
    text = f"the strategy has {len(s.dims)} dims, the tensor {list(shape)} has {len(shape)}"
    raise ValueError(f"{text}, and they match {problem}")


def expanded(s: Slicing) -> Slicing:
    """Returns the layout with at most one axis per dim, as the JSON format requires: ``collapsed`` reversed.

    Axes of a dim that are adjacent in the device matrix are merged to one. Axes that are not adjacent get a
    dim each; MindSpore writes this too, although its own transforms refuse to read it.

    >>> expanded(Slicing((2, 2, 2), ((), (1, 0)), shape=(16, 32))).devices
    (2, 4)
    >>> expanded(Slicing((2, 2, 2), ((), (0, 1)), shape=(16, 32))).shape
    (16, 2, 16)
    """
    s = _merged(s)
    if all(len(dim) < 2 for dim in s.dims):
        return s
    assert s.shape is not None

    # one dim per axis, of the axis's size; the last one has the remaining elements
    dims: list[tuple[int, ...]] = []
    shape: list[int] = []
    for dim, (n, axes) in enumerate(zip(s.shape, s.dims, strict=True)):
        *outer, _ = ways = [s.devices[-1 - axis] for axis in axes] or [1]
        dims += [(axis,) for axis in axes] or [()]
        shape += [*outer, n * ways[-1] // s.count(dim)]
    return replace(s, dims=tuple(dims), shape=tuple(shape), nested=False)


def _merged(s: Slicing) -> Slicing:
    """Merges adjacent axes of a dim to one axis; drops axes of size 1 from a dim with several axes."""
    dims = [tuple(a for a in dim if len(dim) < 2 or s.devices[-1 - a] > 1) for dim in s.dims]
    inner = {a for dim in dims for before, a in pairwise(dim) if before == a + 1}
    if not inner and not any(len(dim) > 1 for dim in s.dims):
        return s

    # outermost first: an axis absorbs the axes right after it that also follow it on its dim
    sizes: list[int] = []
    number: dict[int, int] = {}
    for axis in reversed(range(len(s.devices))):
        n = s.devices[-1 - axis]
        if axis in inner:
            sizes[-1] *= n
        else:
            number[axis] = len(sizes)
            sizes.append(n)
    last = len(sizes) - 1
    joined = tuple(tuple(last - number[a] for a in dim if a not in inner) for dim in dims)
    return replace(s, devices=tuple(sizes), dims=joined, nested=False)


def _ways(s: Slicing, shape: tuple[int, ...], sliced: bool) -> Iterator[Slicing]:
    """Yields the layouts in the dims of ``shape`` that ``s`` can come from.

    A dim that several axes cut is as many dims in ``s``; all but the last have their axis's size.
    """
    assert s.shape is not None
    for ends in combinations(range(1, len(s.dims)), len(shape) - 1):
        groups = [range(a, b) for a, b in zip((0, *ends), (*ends, len(s.dims)), strict=True)]
        real = tuple(prod(s.shape[d] for d in group) for group in groups)
        slice_shape = tuple(
            n // prod(s.count(d) for d in group) for n, group in zip(real, groups, strict=True)
        )
        compared = slice_shape if sliced else real
        if compared == shape and all(_one(s, group) for group in groups):
            dims = tuple(tuple(axis for d in group for axis in s.dims[d]) for group in groups)
            yield replace(s, dims=dims, shape=real, nested=True)


def _one(s: Slicing, group: range) -> bool:
    """Whether the dims ``group`` can be one dim of the real tensor."""
    assert s.shape is not None
    complete = all(s.shape[d] == s.count(d) for d in group[:-1])
    return len(group) == 1 or (complete and all(s.dims[d] for d in group))


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
        problems.append(f"the strategy has a stage {max(file.stages())}, the pipeline {count} stages")

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
                    f"{name}: stage {stage} cuts it differently from an earlier stage; a tensor has one "
                    "layout"
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
        text = f"a slice of {described(piece)} makes {list(shape)}, the strategy says {list(s.shape)}"
        raise ValueError(f"{text}; are these the files that it was saved with?")
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
