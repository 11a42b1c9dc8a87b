"""Strategies as they are written: slices a dim, or names of the axes of a device matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from launcher.errors import Problem
from launcher.plan.operators.resolve import Lookup, strategy_problem
from launcher.plan.operators.strategy import FromFile
from launcher.plan.sharding.op_graph import OpGraph, OpNode
from launcher.plan.sharding.op_rule import OpRule, OpStrategy
from launcher.plan.sharding.operator_names import MARK, main_operators
from launcher.plan.sharding.tensor_layout import TensorLayout

KEY = "parallel.operators"
WORDS = ("in", "out", "input", "output", "makes", "matrix", "axes")


@dataclass(frozen=True)
class Written:
    """What ``key`` says of node ``node``; ``out``: how it is to hand on what it makes, if that is said.

    ``assigned``: by a mode, before it was saved to the file that says it.
    """

    node: int
    key: str
    strategy: OpStrategy
    out: TensorLayout | None = None
    assigned: bool = False


class _Unfit(Exception):
    """Why a strategy does not fit."""


@dataclass(frozen=True)
class _Axes:
    """The names of a device matrix' axes, and their places in it."""

    matrix: tuple[int, ...]
    places: Mapping[str, int]


@dataclass(frozen=True)
class Read:
    """What was found of a stage's operators; ``met``: the keys that name any of them, right or wrong."""

    written: tuple[Written, ...]
    problems: tuple[Problem, ...]
    met: frozenset[str]


def read(
    config: Mapping[str, Any],
    graph: OpGraph,
    rules: Sequence[OpRule | None],
    *,
    names: Sequence[str],
    ranks: int,
) -> Read:
    """What ``config`` says of the operators of one stage, which are called ``names``.

    Exact names beat globs, later keys earlier, and each of them what a file has.
    """
    found: list[Written] = []
    wrong: dict[tuple[str, str], Problem] = {}
    places = _keys(config, graph, rules, names)
    for (module, at), key in places.items():
        if at is None:
            text = f"no operator of {module} can be cut"
            wrong.setdefault((key, text), strategy_problem(key, config[key], text))
            continue
        rule = rules[at]
        if rule is None:
            text = f"{module}: aten.{graph.nodes[at].op} has no rule, so it cannot be cut"
            wrong.setdefault((key, text), strategy_problem(key, config[key], text))
            continue
        try:
            found.append(_read(config[key], _Operator(graph, graph.nodes[at], rule, ranks), at, key))
        except _Unfit as error:
            text = f"{module}: {error}"
            wrong.setdefault((key, str(error)), strategy_problem(key, config[key], text))
    return Read(tuple(found), tuple(wrong.values()), frozenset(places.values()))


def _keys(
    config: Mapping[str, Any], graph: OpGraph, rules: Sequence[OpRule | None], names: Sequence[str]
) -> dict[tuple[str, int | None], str]:
    """The name or glob that says how an operator is cut: by its module and place."""
    modules = Lookup.of({k: v for k, v in config.items() if MARK not in k})
    operators = Lookup.of({k: v for k, v in config.items() if MARK in k})
    out: dict[tuple[str, int | None], str] = {}
    for module, at in main_operators(graph, rules).items():
        key = modules.key(module)
        if key is not None:
            out[module, at] = key

    # an operator's own name says more, unless a file has it and the request the module's
    for at, name in enumerate(names):
        key, place = operators.key(name), (graph.nodes[at].module, at)
        if key is None:
            continue
        other = out.get(place)
        if other is None or not isinstance(config[key], FromFile) or isinstance(config[other], FromFile):
            out[place] = key
    return out


NAMES = "xyzuvw"
"""What axes are called that nobody has named."""


def as_written(strategy: OpStrategy, rule: OpRule, out: TensorLayout | None = None) -> dict[str, Any]:
    """The other way: every tensor that it takes, by names of axes; ``read`` gives the same again.

    >>> matmul = OpRule((("m", "k"), ("k", "n")), (("m", "n"),), (("m", 8), ("k", 8), ("n", 8)), sums=("k",))
    >>> row = as_written(OpStrategy((2, 4), (("m", (0,)), ("k", (1,)))), matmul)
    >>> row
    {'matrix': [2, 4], 'axes': ['x', 'y'], 'in': [['x', 'y'], ['y', None]]}
    """
    names = _axis_names(strategy.matrix)
    said: dict[str, Any] = {
        "matrix": list(strategy.matrix),
        "axes": names,
        "in": [_named_dims(strategy.cut(letters), names) for letters in rule.ins],
    }

    # dims of what it makes that nothing it takes has
    taken = {letter for letters in rule.ins for letter in letters}
    if any(axes and letter not in taken for letter, axes in strategy.axes):
        said["makes"] = [_named_dims(strategy.cut(letters), names) for letters in rule.outs]
    if out is None:
        return said
    if out.matrix == strategy.matrix:
        return {**said, "out": [_named_dims(out, names)]}
    names = _axis_names(out.matrix)
    return {**said, "out": {"matrix": list(out.matrix), "axes": names, "out": [_named_dims(out, names)]}}


def _axis_names(matrix: Sequence[int]) -> list[str]:
    return [NAMES[a] if a < len(NAMES) else f"a{a}" for a in range(len(matrix))]


def _named_dims(layout: TensorLayout, names: Sequence[str]) -> list[Any]:
    dims = [[names[a] for a in axes] for axes in layout.dims]
    return [dim if len(dim) > 1 else (dim[0] if dim else None) for dim in dims]


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
        shown = dict(value) if isinstance(value, FromFile) else value
        raise _Unfit(f"{shown!r}: not a strategy such as {{in: [[2, 4], [4, 1]]}}")
    file = value if isinstance(value, FromFile) else None
    value = _over_matrix(value)
    unknown = [k for k in value if k not in (*WORDS, *op.params)]
    if unknown:
        there = ", ".join([*WORDS, *op.params])
        raise _Unfit(f"{unknown[0]}: no such key; there are {there}")
    tensors = dict(_tensors(value, op))
    asked = _output(value)
    if "matrix" in value or "axes" in value:
        strategy, out = _named(value, op, tensors=tensors, out=asked)
    else:
        strategy, out = _sliced(op, tensors, asked)
    if file is None:
        return Written(at, key, strategy, out)
    return Written(at, file.key or key, strategy, out, file.assigned)


def _over_matrix(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """With a device matrix in these words where it is in MindSpore's."""
    layout = value.get("layout")
    if not isinstance(layout, Mapping) or {*layout} != {"device_matrix", "alias_name"}:
        return value
    others = {k: v for k, v in value.items() if k != "layout"}
    return {"matrix": layout["device_matrix"], "axes": layout["alias_name"], **others}


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
    if listed is None or isinstance(listed, Mapping):
        return listed
    if not isinstance(listed, list | tuple) or len(listed) != 1:
        raise _Unfit(f"out: {listed!r}: not a list with a list for the tensor that it makes")
    return listed[0]


Cut = tuple[OpStrategy, TensorLayout | None]
"""An operator's, and of what it makes."""


def _sliced(op: _Operator, tensors: Mapping[int, Any], out: Any) -> Cut:
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
    return strategy, None if out is None else _sliced_output(op, strategy, out)


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
        return _named_layout(f"in[{place}]", listed[place], shape, axes)
    except _Unfit as error:
        return str(error)


def _sliced_output(op: _Operator, strategy: OpStrategy, out: Any) -> TensorLayout:
    """On the operator's own axes where they cut so, else on a matrix of these numbers."""
    shape = op.graph.values[op.node.outs[0]].shape
    if isinstance(out, Mapping):
        return _own_output(out, shape, op.ranks)
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


def _named(value: Mapping[str, Any], op: _Operator, *, tensors: Mapping[int, Any], out: Any) -> Cut:
    """By the names of the axes of a device matrix that is written, too."""
    axes = device_matrix(value.get("matrix"), value.get("axes"), op.ranks)
    if isinstance(axes, str):
        raise _Unfit(axes)
    why = ""
    for order in _orders(op, tensors):
        try:
            cut = _letters(op, order, value.get("makes"), axes)
            break
        except _Unfit as error:
            why = why or str(error)
    else:
        raise _Unfit(why)
    strategy = OpStrategy(axes.matrix, tuple((letter, own) for letter, own in cut.items() if own))
    if out is None:
        return strategy, None
    shape = op.graph.values[op.node.outs[0]].shape
    if isinstance(out, Mapping):
        return strategy, _own_output(out, shape, op.ranks)
    return strategy, _named_layout("out", out, shape, axes)


def _letters(
    op: _Operator, tensors: Mapping[int, Any], makes: Any, axes: _Axes
) -> dict[str, tuple[int, ...]]:
    """The axes that cut each letter, in the order in which they are met."""
    said = [(f"in[{place}]", op.rule.ins[place], op.shape(place), d) for place, d in sorted(tensors.items())]
    if makes is not None:
        if not isinstance(makes, list | tuple) or len(makes) != len(op.rule.outs):
            raise _Unfit(f"makes: {makes!r}: not a list with a list for each tensor that it makes")
        shapes = op.graph.makes(op.node)
        said += [(f"makes[{i}]", op.rule.outs[i], shapes[i], d) for i, d in enumerate(makes)]

    cut: dict[str, tuple[int, ...]] = {}
    for where, letters, shape, dims in said:
        for d, (letter, own) in enumerate(zip(letters, _names(where, dims, shape, axes), strict=True)):
            if own:
                _cuttable(op, where, d, letter, prod(axes.matrix[a] for a in own))
            if letter and cut.setdefault(letter, own) != own:
                text = f"{where}: dim {d} and the same dim of another tensor are cut by other axes"
                raise _Unfit(text)
    flat = [a for own in cut.values() for a in own]
    if len(flat) != len(set(flat)):
        twice = next(n for n, a in axes.places.items() if flat.count(a) > 1)
        raise _Unfit(f"axis {twice} cuts two dims that are not one")
    return cut


def _own_output(out: Mapping[str, Any], shape: tuple[int, ...], ranks: int) -> TensorLayout:
    """Over a device matrix that is not the operator's."""
    axes = device_matrix(out.get("matrix"), out.get("axes"), ranks)
    if isinstance(axes, str):
        raise _Unfit(f"out: {axes}")
    listed = out.get("out")
    if not isinstance(listed, list | tuple) or len(listed) != 1:
        raise _Unfit(f"out: {listed!r}: not a list with a list for the tensor that it makes")
    return _named_layout("out", listed[0], shape, axes)


def _named_layout(where: str, dims: Any, shape: tuple[int, ...], axes: _Axes) -> TensorLayout:
    layout = TensorLayout(axes.matrix, tuple(_names(where, dims, shape, axes)))
    if not layout.divides(shape):
        raise _Unfit(f"{where}: {dims}: does not divide {list(shape)}")
    return layout


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
