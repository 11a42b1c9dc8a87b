"""Reads one operator's written strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.op_graph import OpGraph, OpNode
from launcher.extras.device_matrix.op_rule import OpRule, OpStrategy
from launcher.extras.device_matrix.written_dims import (
    Axes,
    UnfitError,
    device_matrix,
    dividing_slices,
    named_axes,
    named_layout,
    over_ranks,
    sliced_layout,
    slices,
    text,
)
from launcher.plan.tensor_parallel.strategy_reader import named_matrix
from launcher.plan.values.resolved import StrategyOrigin

WORDS = ("in", "out", "input", "output", "makes", "matrix", "axes")


@dataclass(frozen=True)
class Written:
    """The strategy that ``key`` sets for the operator at place ``node``.

    ``out``: the layout in which its output rests, if that is set. ``assigned``: a mode chose the strategy
    before it was saved to a file.
    """

    node: int
    key: str
    strategy: OpStrategy
    out: TensorLayout | None = None
    assigned: bool = False


@dataclass(frozen=True)
class WrittenOperator:
    """An operator that a strategy is written for; ``shapes``: its inputs in the order that strategies use."""

    graph: OpGraph
    node: OpNode
    rule: OpRule
    ranks: int
    shapes: tuple[tuple[int, ...], ...]

    @property
    def made(self) -> tuple[int, ...]:
        """The shape of its output."""
        return self.graph.values[self.node.outs[0]].shape

    @property
    def params(self) -> dict[str, int]:
        """The places of parameters among its inputs, by their names in the module."""
        values = {value: name.rpartition(".")[2] for name, value in self.graph.params}
        return {values[v]: place for place, v in enumerate(self.node.ins) if v in values}

    @property
    def orders(self) -> tuple[WrittenOperator, ...]:
        """The operator, and for a linear layer also with a transposed weight.

        Its weight may be written as torch stores it, or as a matrix product takes it.
        """
        if self.node.kind != "linear":
            return (self,)

        def turned(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
            return (tensors[0], tensors[1][::-1], *tensors[2:])

        rule = replace(self.rule, ins=turned(self.rule.ins))
        return self, replace(self, rule=rule, shapes=turned(self.shapes))


def strategy_of(
    value: Any, op: WrittenOperator, at: int, key: str, origin: StrategyOrigin | None = None
) -> Written:
    if not isinstance(value, Mapping) or not value:
        raise UnfitError(f"{text(value)}: not a strategy such as {{in: [[2, 4], [4, 1]]}}")
    value = _over_matrix(value)
    unknown = [k for k in value if k not in (*WORDS, *op.params)]
    if unknown:
        known = ", ".join([*WORDS, *op.params])
        raise UnfitError(f"{unknown[0]}: no such key; the keys are {known}")
    tensors = dict(input_dims(value, op))
    axes = matrix_axes(value, op.ranks)
    cut = _cut(op, tensors, axes)
    if "makes" in value:
        _made(value["makes"], op, cut, axes)
    strategy = _strategy(op, cut, axes)
    out = _output(value, op, strategy, axes)
    if origin is None:
        return Written(at, key, strategy, out)
    return Written(at, origin.key or key, strategy, out, origin.assigned)


def _over_matrix(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns ``value`` with the keys ``matrix`` and ``axes`` in place of MindSpore's ``layout``."""
    named = named_matrix(value.get("layout"))
    if named is None:
        return value
    others = {k: v for k, v in value.items() if k != "layout"}
    return {"matrix": named[0], "axes": named[1], **others}


def matrix_axes(value: Mapping[str, Any], ranks: int) -> Axes | None:
    """Returns the named axes; ``None`` if the strategy has numbers of slices."""
    if "matrix" in value or "axes" in value:
        return device_matrix(value.get("matrix"), value.get("axes"), ranks)
    return None


def input_dims(value: Mapping[str, Any], op: WrittenOperator) -> Iterator[tuple[int, Any]]:
    """Yields the place and the written dims of each input."""
    inputs = value.get("in", ())
    if not isinstance(inputs, list | tuple):
        raise UnfitError(f"in: {text(inputs)}: must be a list with one list for each input")
    if len(inputs) > len(op.node.ins):
        shapes = ", ".join(str(list(s)) for s in op.shapes)
        raise UnfitError(f"in: {text(inputs)}: {len(inputs)} tensors, but {op.node.kind} takes {shapes}")
    yield from enumerate(inputs)
    if "input" in value:
        yield 0, value["input"]
    for name, place in op.params.items():
        if name in value:
            yield place, value[name]


class _UnlikeError(UnfitError):
    """Two tensors are cut differently along the same letter."""


Cut = dict[str, tuple[int, ...]]
"""For each letter, the axes that cut it; without a matrix, a single number of slices."""


def _cut(op: WrittenOperator, tensors: Mapping[int, Any], axes: Axes | None) -> Cut:
    """Returns the cut of each letter, in order of occurrence.

    Raises ``UnfitError`` if the tensors fit in none of the operator's ``orders``.
    """
    why: UnfitError | None = None
    for order in op.orders:
        try:
            return _cut_of(order, tensors, axes)
        except UnfitError as error:
            if why is None or isinstance(why, _UnlikeError):
                why = error
    assert why is not None
    raise why


def _cut_of(op: WrittenOperator, tensors: Mapping[int, Any], axes: Axes | None) -> Cut:
    cut: Cut = {}
    first: dict[str, int] = {}
    for place, dims in sorted(tensors.items()):
        where = f"in[{place}]"
        owned = cut_dims(where, dims, op.shapes[place], axes)
        for d, (letter, own) in enumerate(zip(op.rule.ins[place], owned, strict=True)):
            if letter and cut.setdefault(letter, own) != own:
                here, there = (_axes_text(c, axes) for c in (own, cut[letter]))
                other = f"the same dim of in[{first[letter]}]"
                raise _UnlikeError(f"{where}: {text(dims)}: dim {d} is cut {here}, but {other} {there}")
            first.setdefault(letter, place)
    for place, dims in sorted(tensors.items()):
        _divided(op, place, dims, axes)
    if axes is None:
        over_ranks("in: ", [n for (n,) in cut.values()], op.ranks)
    else:
        _once(cut, axes)
    return cut


def _made(makes: Any, op: WrittenOperator, cut: Cut, axes: Axes | None) -> None:
    """Adds the cuts of output dims that no input has."""
    shapes = op.graph.makes(op.node)
    if not isinstance(makes, list | tuple) or len(makes) != len(shapes):
        raise UnfitError(f"makes: {text(makes)}: must be a list with one list for each output")
    for i, (dims, shape, letters) in enumerate(zip(makes, shapes, op.rule.outs, strict=True)):
        where = f"makes[{i}]"
        for d, (letter, own) in enumerate(zip(letters, cut_dims(where, dims, shape, axes), strict=True)):
            if slice_count(own, axes) > 1 and (not letter or op.rule.size[letter] % slice_count(own, axes)):
                raise UnfitError(f"{where}: {text(dims)}: dim {d} of {list(shape)} cannot be cut this way")
            if letter and cut.setdefault(letter, own) != own:
                raise UnfitError(f"{where}: {text(dims)}: dim {d} is cut differently from the input")
    if axes is None:
        over_ranks("makes: ", [n for (n,) in cut.values()], op.ranks)
    else:
        _once(cut, axes)


def cut_dims(where: str, dims: Any, shape: Sequence[int], axes: Axes | None) -> list[tuple[int, ...]]:
    if axes is None:
        return [(n,) for n in slices(where, dims, shape)]
    return named_axes(where, dims, shape, axes)


def _axes_text(cut: tuple[int, ...], axes: Axes | None) -> str:
    if axes is None:
        return f"in {cut[0]}"
    names = list(axes.places)
    return f"by {' and '.join(names[a] for a in cut)}" if cut else "by no axis"


def _divided(op: WrittenOperator, place: int, dims: Any, axes: Axes | None) -> None:
    """Raises ``UnfitError`` if a dim cannot be cut as written."""
    where, shape = f"in[{place}]: {text(dims)}", op.shapes[place]
    for d, (letter, own) in enumerate(zip(op.rule.ins[place], cut_dims("", dims, shape, axes), strict=True)):
        n = slice_count(own, axes)
        if n == 1:
            continue
        if not letter:
            raise UnfitError(f"{where}: dim {d} of {list(shape)} is cut, but {op.node.kind} needs all of it")
        if shape[d] % n:
            raise UnfitError(f"{where}: dim {d} of {list(shape)} is not a multiple of {n}")
        if op.rule.size[letter] % n:
            outer = op.rule.size[letter]
            why = f"{op.node.kind} allows {outer} parts, which is not a multiple of {n}"
            raise UnfitError(f"{where}: dim {d} of {list(shape)}: {why}")


def slice_count(own: tuple[int, ...], axes: Axes | None) -> int:
    return own[0] if axes is None else prod(axes.matrix[a] for a in own)


def _once(cut: Cut, axes: Axes) -> None:
    flat = [a for own in cut.values() for a in own]
    for name, a in axes.places.items():
        if flat.count(a) > 1:
            raise UnfitError(f"in: axis {name} cuts two dims that are not the same")


def _strategy(op: WrittenOperator, cut: Cut, axes: Axes | None) -> OpStrategy:
    """Returns the strategy. Without named axes, the numbers of slices are the device matrix, in order.

    If they leave ranks over, an innermost axis is added over which ranks repeat the computation, as in
    MindSpore.
    """
    if axes is not None:
        return OpStrategy(axes.matrix, tuple((letter, own) for letter, own in cut.items() if own))
    ways = {letter: n for letter, (n,) in cut.items() if n > 1}
    used = prod(ways.values())
    rest = () if used == op.ranks else (op.ranks // used,)
    matrix = (*ways.values(), *rest) or (op.ranks,)
    return OpStrategy(matrix, tuple((letter, (i,)) for i, letter in enumerate(ways)))


def _output(
    value: Mapping[str, Any], op: WrittenOperator, strategy: OpStrategy, axes: Axes | None
) -> TensorLayout | None:
    """Returns the requested layout of the output, if any.

    Numbers of slices use the operator's own axes if these cut the output so, otherwise a separate matrix.
    """
    output = output_dims(value)
    if output is None:
        return None
    if isinstance(output, Mapping):  # it has a device matrix of its own
        own_axes = device_matrix(output.get("matrix"), output.get("axes"), op.ranks)
        return named_layout("out", output_dims({"out": output.get("out", ())}), op.made, own_axes)
    if axes is not None:
        return named_layout("out", output, op.made, axes)
    own = strategy.makes(op.rule, 0).summed()
    same = own.slices == tuple(dividing_slices("out", output, op.made))
    return own if same else sliced_layout("out", output, op.made, op.ranks)


def output_dims(value: Mapping[str, Any]) -> Any:
    if "output" in value:
        return value["output"]
    output = value.get("out")
    if output is None or isinstance(output, Mapping):
        return output
    if not isinstance(output, list | tuple) or len(output) != 1:
        raise UnfitError(f"out: {text(output)}: must be a list with one list, for the only output")
    return output[0]
