"""The written form of one tensor's dims: numbers of slices, or names of the axes of a device matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from launcher.extras.device_matrix.layout import TensorLayout
from launcher.plan.tensor_parallel.strategy_reader import entry_names
from launcher.plan.values.grid import divisors
from launcher.plan.values.text import many


class UnfitError(Exception):
    """A written strategy does not fit; the message says why."""


@dataclass(frozen=True)
class Axes:
    """A device matrix, and the places of its named axes."""

    matrix: tuple[int, ...]
    places: Mapping[str, int]


def text(value: Any) -> str:
    """Formats ``value`` as in an override.

    >>> text([["x", None], {"matrix": (2, 4)}, 3])
    '[[x, null], {matrix: [2, 4]}, 3]'
    """
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(text, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def slices(where: str, dims: Any, shape: Sequence[int]) -> list[int]:
    """Returns the number of slices of each dim, whether or not they divide it."""
    if not isinstance(dims, list | tuple):
        raise UnfitError(f"{where}: {text(dims)}: must be a list with one number of slices for each dim")
    counts = [1 if n is None else n for n in dims]
    if not all(type(n) is int and n > 0 for n in counts):
        raise UnfitError(
            f"{where}: {text(dims)}: numbers of slices must be positive; names need the keys matrix and axes"
        )
    if len(counts) != len(shape):
        raise UnfitError(
            f"{where}: {text(dims)}: {many(len(counts), 'dim')}, but the tensor is {list(shape)}"
        )
    return counts


def dividing_slices(where: str, dims: Any, shape: Sequence[int]) -> list[int]:
    """Returns the number of slices of each dim. Raises ``UnfitError`` if one does not divide its dim."""
    counts = slices(where, dims, shape)
    for d, (n, size) in enumerate(zip(counts, shape, strict=True)):
        if size % n:
            raise UnfitError(f"{where}: {text(dims)}: dim {d} of {list(shape)} is not a multiple of {n}")
    return counts


def over_ranks(where: str, counts: Sequence[int], ranks: int) -> None:
    """Raises ``UnfitError`` if the slices do not divide ``ranks``."""
    ways = [n for n in counts if n > 1]
    used = prod(ways)
    if ranks % used:
        product = " x ".join(map(str, ways))
        total = f"{product} = {used}" if len(ways) > 1 else product
        fits = ", ".join(map(str, divisors(ranks)))
        raise UnfitError(
            f"{where}{total} slices do not divide the {ranks} ranks of a stage; possible: {fits}"
        )


def nearest_slices(counts: Sequence[int], shape: Sequence[int], ranks: int) -> list[int]:
    """Returns the most slices, none above ``counts``, that divide their dims and together divide ``ranks``.

    >>> nearest_slices([3, 16], [12, 24], 8)
    [2, 4]
    """
    out: list[int] = []
    for n, size in zip(counts, shape, strict=True):
        remaining = ranks // prod(out)
        out.append(max(k for k in divisors(remaining) if k <= n and size % k == 0))
    return out


def sliced_layout(where: str, dims: Any, shape: tuple[int, ...], ranks: int) -> TensorLayout:
    """Returns the layout of a tensor from numbers of slices, which are the axes of its matrix."""
    counts = dividing_slices(where, dims, shape)
    over_ranks(f"{where}: {text(dims)}: ", counts, ranks)
    cuts = [n for n in counts if n > 1]
    axes = iter(range(len(cuts)))
    at = tuple((next(axes),) if n > 1 else () for n in counts)
    rest = [] if prod(cuts) == ranks else [ranks // prod(cuts)]
    return TensorLayout((*cuts, *rest) or (ranks,), at)


def device_matrix(matrix: Any, names: Any, ranks: int) -> Axes:
    """Returns the axes of a matrix over all ranks of a stage.

    If the matrix has fewer ranks, it gets an unnamed innermost axis, over which ranks repeat the computation.
    """
    form = "{matrix: [2, 4], axes: [x, y]}"
    if (
        not isinstance(matrix, list | tuple)
        or not matrix
        or not all(type(n) is int and n > 0 for n in matrix)
    ):
        raise UnfitError(f"matrix: {text(matrix)}: must be the sizes of its axes, as in {form}")
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UnfitError(f"axes: {text(names)}: must be the names of the axes of the matrix, as in {form}")
    if len(names) != len(matrix):
        raise UnfitError(
            f"axes: {text(names)}: must name each of the {len(matrix)} axes of matrix {text(matrix)}"
        )
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UnfitError(f"axes: {text(names)}: two axes are called {twice[0]}")
    if ranks % prod(matrix):
        fits = ", ".join(map(str, divisors(ranks)))
        raise UnfitError(
            f"matrix: {text(matrix)}: its {prod(matrix)} ranks do not divide the {ranks} ranks of a stage; "
            f"possible: {fits}"
        )
    rest = [] if prod(matrix) == ranks else [ranks // prod(matrix)]
    return Axes((*matrix, *rest), {name: i for i, name in enumerate(names)})


def named_axes(where: str, dims: Any, shape: Sequence[int], axes: Axes) -> list[tuple[int, ...]]:
    """Returns the axes that cut each dim."""
    if not isinstance(dims, list | tuple):
        raise UnfitError(f"{where}: {text(dims)}: must be a list with axes or null for each dim")
    if len(dims) != len(shape):
        raise UnfitError(f"{where}: {text(dims)}: {many(len(dims), 'dim')}, but the tensor is {list(shape)}")
    out: list[tuple[int, ...]] = []
    for entry in dims:
        names = entry_names(entry)
        for name in names:
            if not isinstance(name, str) or name not in axes.places:
                known = ", ".join(axes.places)
                raise UnfitError(
                    f"{where}: {text(dims)}: {text(name)} is not an axis; the axes are {known}, or null"
                )
        out.append(tuple(axes.places[n] for n in names))
    flat = [a for own in out for a in own]
    if len(flat) != len(set(flat)):
        twice = next(n for n, a in axes.places.items() if flat.count(a) > 1)
        raise UnfitError(f"{where}: {text(dims)}: axis {twice} cannot cut twice")
    return out


def named_layout(where: str, dims: Any, shape: tuple[int, ...], axes: Axes) -> TensorLayout:
    """Returns the layout of a tensor from the names of axes."""
    layout = TensorLayout(axes.matrix, tuple(named_axes(where, dims, shape, axes)))
    for d, (n, size) in enumerate(zip(layout.slices, shape, strict=True)):
        if size % n:
            raise UnfitError(f"{where}: {text(dims)}: dim {d} of {list(shape)} is not a multiple of {n}")
    return layout
