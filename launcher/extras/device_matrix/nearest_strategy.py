"""The nearest strategy of an operator that fits, as a cure for one that does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from shlex import quote
from typing import Any

from launcher.extras.device_matrix.written_dims import Axes, UnfitError, nearest_slices, text
from launcher.extras.device_matrix.written_operator import (
    Cut,
    WrittenOperator,
    cut_dims,
    input_dims,
    matrix_axes,
    output_dims,
    slice_count,
    strategy_of,
)
from launcher.plan.tensor_parallel.module_strategies import KEY
from launcher.plan.values.grid import divisors
from launcher.plan.values.resolved import StrategyOrigin


def nearest_cure(key: str, value: Any, op: WrittenOperator, origin: StrategyOrigin | None) -> str:
    """Returns the override with the nearest strategy that fits; "" if there is none."""
    if origin is not None or not isinstance(value, Mapping):
        return ""
    for name, change in _changes(value, op):
        if not _cuts(change):
            continue  # the user did not mean to cut nothing
        try:
            strategy_of({**value, name: change}, op, 0, key)
        except UnfitError:
            continue
        return quote(f"{KEY}.{key}.{name}={text(change)}")
    return ""


def _cuts(change: Any) -> bool:
    return any(map(_cuts, change)) if isinstance(change, list) else change not in (None, 1)


def _changes(value: Mapping[str, Any], op: WrittenOperator) -> Iterator[tuple[str, Any]]:
    """Yields changes of a single key: a smaller matrix, fewer slices, fewer axes per dim."""
    matrix, names = value.get("matrix"), value.get("axes")
    if isinstance(matrix, list | tuple) and all(type(n) is int and n > 0 for n in matrix):
        yield "matrix", nearest_slices(matrix, [op.ranks] * len(matrix), op.ranks)
    try:
        tensors = dict(input_dims({"in": value.get("in", ())}, op))
        axes = matrix_axes(value, op.ranks)
    except UnfitError:
        return
    for order in op.orders:
        try:
            yield "in", _nearest(order, tensors, axes, names)
        except UnfitError:
            continue
    try:
        output = output_dims(value)
        counts = [slice_count(own, axes) for own in cut_dims("out", output, op.made, axes)]
    except UnfitError:
        return
    if axes is None:
        yield "out", [nearest_slices(counts, op.made, op.ranks)]
    else:
        yield "out", [[n if s % c == 0 else None for n, c, s in zip(output, counts, op.made, strict=True)]]


def _nearest(
    op: WrittenOperator, tensors: Mapping[int, Any], axes: Axes | None, names: Any
) -> list[list[Any]]:
    """Returns the inputs with the most slices, or axes, that each letter and the ranks allow."""
    cut: Cut = {}
    for place, dims in sorted(tensors.items()):
        owned = cut_dims(f"in[{place}]", dims, op.shapes[place], axes)
        for letter, own in zip(op.rule.ins[place], owned, strict=True):
            if letter and cut.setdefault(letter, own) != own:
                raise UnfitError("two different cuts are possible")

    # letter by letter, from the ranks that remain
    got: dict[str, Any] = {"": None if axes else 1}
    remaining = op.ranks
    for letter, own in cut.items():
        size = op.rule.size[letter]
        if axes is None:
            got[letter] = max(k for k in divisors(remaining) if k <= own[0] and size % k == 0)
            remaining //= got[letter]
        else:
            while own and size % slice_count(own, axes):
                own = own[:-1]
            axis_names = [names[a] for a in own]
            got[letter] = axis_names if len(axis_names) > 1 else next(iter(axis_names), None)
    return [[got[letter] for letter in op.rule.ins[place]] for place in tensors]
