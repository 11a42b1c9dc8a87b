"""Strategies as they are written: slices a dim, or names of the axes of a device matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from launcher.errors import Problem
from launcher.plan.sharding.op_graph import OpGraph, OpNode
from launcher.plan.sharding.op_rule import OpRule, OpStrategy
from launcher.plan.sharding.tensor_layout import TensorLayout

KEY = "parallel.operators"
WORDS = ("in", "out", "input", "output", "matrix", "axes")


@dataclass(frozen=True)
class Written:
    """What ``key`` says of node ``node``; ``out``: how it is to hand on what it makes, if that is said."""

    node: int
    key: str
    strategy: OpStrategy
    out: TensorLayout | None = None


class _Unfit(Exception):
    """Why a strategy does not fit."""


@dataclass(frozen=True)
class _Axes:
    """The names of a device matrix' axes, and their places in it."""

    matrix: tuple[int, ...]
    places: Mapping[str, int]


def read(
    config: Mapping[str, Any], graph: OpGraph, rules: Sequence[OpRule | None], ranks: int
) -> tuple[tuple[Written, ...], list[Problem]]:
    """What ``config`` says of the operators of one stage. Exact names beat globs, later keys earlier."""
    found: list[Written] = []
    wrong: dict[tuple[str, str], Problem] = {}
    for module in dict.fromkeys(n.module for n in graph.nodes):
        key = key_of(config, module)
        if key is None:
            continue
        at = _operator(graph, rules, module)
        where = f"{KEY}.{key}"
        if at is None:
            text = f"no operator of {module} can be cut"
            wrong.setdefault((key, text), Problem(where, text))
            continue
        rule = rules[at]
        assert rule is not None
        try:
            found.append(_read(config[key], _Operator(graph, graph.nodes[at], rule, ranks), at, key))
        except _Unfit as error:
            wrong.setdefault((key, str(error)), Problem(where, f"{module}: {error}"))
    return tuple(found), list(wrong.values())


NAMES = "xyzuvw"
"""What axes are called that nobody has named."""


def as_written(strategy: OpStrategy, rule: OpRule, out: TensorLayout | None = None) -> dict[str, Any]:
    """The other way: every tensor that it takes, by names of axes; ``read`` gives the same again.

    >>> matmul = OpRule((("m", "k"), ("k", "n")), (("m", "n"),), (("m", 8), ("k", 8), ("n", 8)), sums=("k",))
    >>> row = as_written(OpStrategy((2, 4), (("m", (0,)), ("k", (1,)))), matmul)
    >>> row
    {'matrix': [2, 4], 'axes': ['x', 'y'], 'in': [['x', 'y'], ['y', None]]}
    """
    names = [NAMES[a] if a < len(NAMES) else f"a{a}" for a in range(len(strategy.matrix))]

    def tensor(layout: TensorLayout) -> list[Any]:
        dims = [[names[a] for a in axes] for axes in layout.dims]
        return [dim if len(dim) > 1 else (dim[0] if dim else None) for dim in dims]

    ins = [tensor(strategy.cut(letters)) for letters in rule.ins]
    said = {"matrix": list(strategy.matrix), "axes": names, "in": ins}
    return said if out is None else {**said, "out": [tensor(out)]}


def key_of(config: Mapping[str, Any], module: str) -> str | None:
    """The name or glob that says how ``module`` is cut."""
    if module in config:
        return module
    return next((k for k in reversed(list(config)) if fnmatchcase(module, k)), None)


def _operator(graph: OpGraph, rules: Sequence[OpRule | None], module: str) -> int | None:
    """Of a module's operators on parameters of its own the one that takes most, else the first of all."""
    mine = [at for at, n in enumerate(graph.nodes) if n.module == module and rules[at] is not None]
    params = {value for _, value in graph.params}
    own = [at for at in mine if params.intersection(graph.nodes[at].ins)]
    if own:
        return max(own, key=lambda at: (sum(map(prod, graph.shapes(graph.nodes[at]))), -at))
    return next(iter(mine), None)


@dataclass(frozen=True)
class _Operator:
    graph: OpGraph
    node: OpNode
    rule: OpRule
    ranks: int

    def shape(self, place: int) -> tuple[int, ...]:
        return self.graph.values[self.node.ins[place]].shape

    @property
    def params(self) -> dict[str, int]:
        """Where it takes parameters, by their names in the module."""
        values = {value: name.rpartition(".")[2] for name, value in self.graph.params}
        return {values[v]: place for place, v in enumerate(self.node.ins) if v in values}


def _read(value: Any, op: _Operator, at: int, key: str) -> Written:
    if not isinstance(value, Mapping) or not value:
        raise _Unfit(f"{value!r}: not a strategy such as {{in: [[2, 4], [4, 1]]}}")
    unknown = [k for k in value if k not in (*WORDS, *op.params)]
    if unknown:
        there = ", ".join([*WORDS, *op.params])
        raise _Unfit(f"{unknown[0]}: no such key; there are {there}")
    tensors = dict(_tensors(value, op))
    out = _output(value)
    if "matrix" in value or "axes" in value:
        return _named(value, op, tensors=tensors, out=out, at=at, key=key)
    return _sliced(op, tensors, out, at=at, key=key)


def _tensors(value: Mapping[str, Any], op: _Operator) -> Iterator[tuple[int, Any]]:
    """What is said of each tensor that it takes, by its place."""
    listed = value.get("in", ())
    if not isinstance(listed, list | tuple):
        raise _Unfit(f"in: {listed!r}: not a list with a list a tensor")
    if len(listed) > len(op.node.ins):
        raise _Unfit(f"in: {len(listed)} tensors; it takes {len(op.node.ins)}")
    yield from enumerate(listed)
    if "input" in value:
        yield 0, value["input"]
    for name, place in op.params.items():
        if name in value:
            yield place, value[name]


def _output(value: Mapping[str, Any]) -> Any:
    if "output" in value:
        return value["output"]
    listed = value.get("out")
    if listed is None:
        return None
    if not isinstance(listed, list | tuple) or len(listed) != 1:
        raise _Unfit(f"out: {listed!r}: not a list with a list for the tensor that it makes")
    return listed[0]


def _sliced(op: _Operator, tensors: Mapping[int, Any], out: Any, *, at: int, key: str) -> Written:
    """By numbers of slices, over a device matrix of these numbers in their order."""
    why = ""
    for order in _orders(op, tensors):
        try:
            cut = _slices(op, order)
            break
        except _Unfit as error:
            why = why or str(error)
    else:
        raise _Unfit(why)

    # what is left of the ranks computes again what others do: the innermost axis, as MindSpore has it
    ways = {letter: n for letter, n in cut.items() if n > 1}
    used = prod(ways.values())
    if op.ranks % used:
        fits = [n for n in range(1, op.ranks + 1) if op.ranks % n == 0]
        said = " x ".join(map(str, ways.values()))
        text = f"{said} = {used} slices do not divide the {op.ranks} ranks of a stage"
        raise _Unfit(f"{text}; what does: {', '.join(map(str, fits))}")
    rest = () if used == op.ranks else (op.ranks // used,)
    matrix = (*ways.values(), *rest) or (op.ranks,)
    strategy = OpStrategy(matrix, tuple((letter, (i,)) for i, letter in enumerate(ways)))
    return Written(at, key, strategy, None if out is None else _sliced_output(op, strategy, out))


def _orders(op: _Operator, tensors: Mapping[int, Any]) -> Iterator[Mapping[int, Any]]:
    """A linear layer's weight may be written as torch keeps it, or as a matrix product takes it."""
    yield tensors
    weight = tensors.get(1)
    if op.node.kind == "linear" and isinstance(weight, list | tuple) and len(weight) == 2:
        yield {**tensors, 1: [weight[1], weight[0]]}


def _slices(op: _Operator, tensors: Mapping[int, Any]) -> dict[str, int]:
    """Into how many each letter is cut, in the order in which they are met."""
    cut: dict[str, int] = {}
    for place, dims in sorted(tensors.items()):
        counts = _counts(f"in[{place}]", dims, op.shape(place))
        for d, (letter, n) in enumerate(zip(op.rule.ins[place], counts, strict=True)):
            if n > 1:
                _cuttable(op, f"in[{place}]", d, letter, n)
            if letter and cut.setdefault(letter, n) != n:
                text = f"in[{place}]: dim {d} is cut in {n}, and the same dim of another tensor"
                raise _Unfit(f"{text} in {cut[letter]}")
    return cut


def _counts(where: str, dims: Any, shape: tuple[int, ...]) -> list[int]:
    if not isinstance(dims, list | tuple):
        raise _Unfit(f"{where}: {dims!r}: not a list with a number of slices a dim")
    counts = [1 if n is None else n for n in dims]
    if not all(type(n) is int and n > 0 for n in counts):
        raise _Unfit(f"{where}: {list(dims)}: not positive numbers of slices; names need matrix and axes")
    if len(counts) != len(shape):
        raise _Unfit(f"{where}: {list(dims)} has {len(counts)} entries, and the tensor is {list(shape)}")
    for d, (n, size) in enumerate(zip(counts, shape, strict=True)):
        if size % n:
            raise _Unfit(f"{where}: {list(dims)}: dim {d} of {list(shape)} has {size}, no multiple of {n}")
    return counts


def _cuttable(op: _Operator, where: str, d: int, letter: str, n: int) -> None:
    if not letter:
        raise _Unfit(f"{where}: dim {d} is cut, and {op.node.kind} needs all of it")
    if op.rule.size[letter] % n:
        text = f"{where}: dim {d} is cut in {n}, and only its outermost {op.rule.size[letter]} can be"
        raise _Unfit(text)


def layout_of(asked: Any, place: int, shape: tuple[int, ...], ranks: int) -> TensorLayout | str:
    """What a strategy of a batch's tensors says of tensor ``place``, or what is wrong with that."""
    try:
        if not isinstance(asked, Mapping):
            return _slices_alone(f"[{place}]", asked[place], shape, ranks)
        axes = device_matrix(asked.get("matrix"), asked.get("axes"), ranks)
        if isinstance(axes, str):
            return axes
        listed = asked.get("in")
        if not isinstance(listed, list | tuple) or len(listed) <= place:
            return f"in: {listed!r}: not a list with an entry a tensor of a batch"
        layout = TensorLayout(axes.matrix, tuple(_names(f"in[{place}]", listed[place], shape, axes)))
        if not layout.divides(shape):
            return f"in[{place}]: {listed[place]}: does not divide {list(shape)}"
        return layout
    except _Unfit as error:
        return str(error)


def _sliced_output(op: _Operator, strategy: OpStrategy, out: Any) -> TensorLayout:
    """On the operator's own axes where they cut so, else on a matrix of these numbers."""
    shape = op.graph.values[op.node.outs[0]].shape
    counts = tuple(_counts("out", out, shape))
    own = strategy.makes(op.rule, 0).summed()
    return own if own.slices == counts else _slices_alone("out", counts, shape, op.ranks)


def _slices_alone(where: str, asked: Any, shape: tuple[int, ...], ranks: int) -> TensorLayout:
    """A tensor by numbers of slices, over a matrix of these numbers."""
    counts = tuple(_counts(where, asked, shape))
    used = prod(counts)
    if ranks % used:
        raise _Unfit(f"{where}: {list(counts)}: {used} slices do not divide the {ranks} ranks of a stage")
    cuts = [n for n in counts if n > 1]
    axes = iter(range(len(cuts)))
    dims = tuple((next(axes),) if n > 1 else () for n in counts)
    rest = [] if used == ranks else [ranks // used]
    return TensorLayout((*cuts, *rest) or (ranks,), dims)


def _named(
    value: Mapping[str, Any], op: _Operator, *, tensors: Mapping[int, Any], out: Any, at: int, key: str
) -> Written:
    """By the names of the axes of a device matrix that is written, too."""
    axes = device_matrix(value.get("matrix"), value.get("axes"), op.ranks)
    if isinstance(axes, str):
        raise _Unfit(axes)
    cut: dict[str, tuple[int, ...]] = {}
    for place, dims in sorted(tensors.items()):
        where = f"in[{place}]"
        for d, (letter, own) in enumerate(
            zip(op.rule.ins[place], _names(where, dims, op.shape(place), axes), strict=True)
        ):
            if own:
                _cuttable(op, where, d, letter, prod(axes.matrix[a] for a in own))
            if letter and cut.setdefault(letter, own) != own:
                text = f"{where}: dim {d} and the same dim of another tensor are cut by other axes"
                raise _Unfit(text)
    flat = [a for own in cut.values() for a in own]
    if len(flat) != len(set(flat)):
        twice = next(n for n, a in axes.places.items() if flat.count(a) > 1)
        raise _Unfit(f"axis {twice} cuts two dims that are not one")
    strategy = OpStrategy(axes.matrix, tuple((letter, own) for letter, own in cut.items() if own))
    made = None
    if out is not None:
        shape = op.graph.values[op.node.outs[0]].shape
        made = TensorLayout(axes.matrix, tuple(_names("out", out, shape, axes)))
        if not made.divides(shape):
            raise _Unfit(f"out: {out}: does not divide {list(shape)}")
    return Written(at, key, strategy, made)


def device_matrix(matrix: Any, names: Any, ranks: int) -> _Axes | str:
    """The axes of a matrix over all ranks of a stage, or what is wrong with it.

    Ranks that a smaller matrix leaves over repeat what others do: its innermost axis has no name.
    """
    good = isinstance(matrix, list | tuple) and isinstance(names, list | tuple) and len(matrix) == len(names)
    if not good or not all(type(n) is int and n > 0 for n in matrix) or len(set(names)) < len(names):
        return f"matrix {matrix!r} with axes {names!r}: not a positive size and a name of its own an axis"
    if ranks % prod(matrix):
        return f"matrix {list(matrix)}: its {prod(matrix)} ranks do not divide the {ranks} ranks of a stage"
    sizes = tuple(matrix)
    if prod(sizes) < ranks:
        sizes = (*sizes, ranks // prod(sizes))
    return _Axes(sizes, {str(name): i for i, name in enumerate(names)})


def _names(where: str, dims: Any, shape: tuple[int, ...], axes: _Axes) -> list[tuple[int, ...]]:
    """The axes that cut each dim."""
    if not isinstance(dims, list | tuple) or len(dims) != len(shape):
        raise _Unfit(f"{where}: {dims!r}: not an entry a dim of {list(shape)}")
    out: list[tuple[int, ...]] = []
    for entry in dims:
        alone = () if entry in (None, "None") else (entry,)
        names = entry if isinstance(entry, list | tuple) else alone
        for name in names:
            if name not in axes.places:
                raise _Unfit(f"{where}: {name!r} is no axis; there are {', '.join(axes.places)} and null")
        out.append(tuple(axes.places[n] for n in names))
    flat = [a for own in out for a in own]
    if len(flat) != len(set(flat)):
        raise _Unfit(f"{where}: {list(dims)}: one axis cannot cut two dims")
    return out
