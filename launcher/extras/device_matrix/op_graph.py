"""Operators of a stage, and their dimensions by letters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TypeAlias, Union

from launcher.extras.device_matrix.layout import TensorLayout
from launcher.plan.values.tensor_spec import TensorSpec


@dataclass(frozen=True)
class Ref:
    """A tensor among the arguments of an operator; ``value``: the place of its value in the graph."""

    value: int


@dataclass(frozen=True)
class Name:
    """A constant that is a dtype, a device or a memory format, as torch prints it."""

    text: str


Arg: TypeAlias = Union[Ref, Name, bool, int, float, complex, str, "tuple[Arg, ...]", None]


@dataclass(frozen=True)
class Value:
    """One tensor of a graph. ``trains``: it requires a gradient. ``strides``: empty if it is row-major.

    Strides matter because random numbers are drawn for a tensor in the order of its memory.
    """

    spec: TensorSpec
    trains: bool
    strides: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape


@dataclass(frozen=True)
class OpNode:
    """One call of torch's operator ``op``, such as ``linear`` or ``add.Tensor``, on full tensors.

    ``module``: the module whose code calls it, "" for the model's own. ``outs``: the values it makes.
    """

    op: str
    module: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outs: tuple[int, ...]

    @cached_property
    def ins(self) -> tuple[int, ...]:
        """The values it takes, in the order of its arguments, repeated as often as they occur."""
        return tuple(_refs((*self.args, *(v for _, v in self.kwargs))))

    @property
    def kind(self) -> str:
        """The operator without its overload: ``linear``."""
        return self.op.partition(".")[0]

    def kwarg(self, name: str, otherwise: Arg = None) -> Arg:
        return dict(self.kwargs).get(name, otherwise)


def renumbered(node: OpNode, new: Callable[[int], int]) -> OpNode:
    """Returns ``node`` with the number ``new`` in place of each value that it takes."""

    def change(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(new(arg.value))
        return tuple(map(change, arg)) if isinstance(arg, tuple) else arg

    kwargs = tuple((name, change(arg)) for name, arg in node.kwargs)
    return replace(node, args=tuple(map(change, node.args)), kwargs=kwargs)


def _refs(arg: Arg) -> Iterator[int]:
    if isinstance(arg, Ref):
        yield arg.value
    elif isinstance(arg, tuple):
        for a in arg:
            yield from _refs(a)


@dataclass(frozen=True)
class OpGraph:
    """A graph of operators; values are numbered by their places in ``values``.

    ``params``: the first names of parameters and buffers, with their values. ``buffers``: the names of the
    buffers. ``changes``: buffers that a forward changes, with their new values.
    """

    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    params: tuple[tuple[str, int], ...]
    nodes: tuple[OpNode, ...]
    outputs: tuple[int, ...]
    buffers: frozenset[str] = frozenset()
    changes: tuple[tuple[str, int], ...] = ()

    def shapes(self, node: OpNode) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors that it takes."""
        return tuple(self.values[v].shape for v in node.ins)

    def makes(self, node: OpNode) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors that it makes."""
        return tuple(self.values[v].shape for v in node.outs)


Letters = tuple[str, ...]
"""An index letter for each dim of one tensor; "" for a dim that every rank needs in full."""


@dataclass(frozen=True)
class OpRule:
    """The ways in which one operator may be cut.

    ``ins`` and ``outs``: letters of the tensors it takes and makes. ``sizes``: for each letter, the number
    that its slices have to divide. A letter of a dim that a view merges or splits stands for the outermost
    part: in ``[8, 3 * 4] -> [8, 3, 4]``, dim 1 of both tensors has the same letter, of size 3. ``sums``:
    letters that are summed over: if one is cut, each rank has a term of the output. ``inside``: letters whose
    cut needs collectives inside of the operator (softmax over its classes). ``kernel``: what a rank runs on
    its parts; "" is the operator itself, with the sizes of the parts among its arguments.

    >>> OpRule((("m", "k"), ("n", "k")), (("m", "n"),), (("k", 4), ("m", 8), ("n", 2)), sums=("k",)).letters
    ('k', 'm', 'n')
    """

    ins: tuple[Letters, ...]
    outs: tuple[Letters, ...]
    sizes: tuple[tuple[str, int], ...]
    sums: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    kernel: str = ""

    @property
    def letters(self) -> Letters:
        return tuple(letter for letter, _ in self.sizes)

    @cached_property
    def size(self) -> dict[str, int]:
        return dict(self.sizes)


@dataclass(frozen=True)
class OpStrategy:
    """How one operator is cut over the ranks of a stage: for each letter, ``axes`` of the device ``matrix``.

    Axes are in order, outermost first. A letter without axes is not cut. Ranks along an axis that no letter
    uses repeat the computation.
    """

    matrix: tuple[int, ...]
    axes: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @cached_property
    def of(self) -> dict[str, tuple[int, ...]]:
        return dict(self.axes)

    @property
    def ranks(self) -> int:
        return prod(self.matrix)

    @property
    def used(self) -> tuple[int, ...]:
        """The axes that cut a letter, ascending."""
        return tuple(sorted(a for _, axes in self.axes for a in axes))

    def cut(self, letters: Letters) -> TensorLayout:
        """The layout of a tensor with these letters."""
        return TensorLayout(self.matrix, tuple(self.of.get(letter, ()) for letter in letters))

    def takes(self, rule: OpRule, place: int) -> TensorLayout:
        """The layout in which it takes tensor ``place``."""
        return self.cut(rule.ins[place])

    def makes(self, rule: OpRule, place: int) -> TensorLayout:
        """The layout of output ``place``, partial over the axes of letters that are summed over."""
        out = self.cut(rule.outs[place])
        terms = tuple(sorted(a for letter in rule.sums for a in self.of.get(letter, ())))
        return TensorLayout(out.matrix, out.dims, terms)

    def gradient_terms(self, rule: OpRule, place: int) -> tuple[int, ...]:
        """The axes over which the gradient of tensor ``place`` consists of terms of a sum.

        These are the axes that cut the operator but not this tensor.
        """
        own = {a for axes in self.takes(rule, place).dims for a in axes}
        return tuple(a for a in self.used if a not in own)

    def fits(self, rule: OpRule) -> bool:
        """Whether the slices of each letter divide its size."""
        return all(n % self.slices(letter) == 0 for letter, n in rule.sizes)

    def slices(self, letter: str) -> int:
        """The number of slices that ``letter`` is cut into."""
        return prod(self.matrix[a] for a in self.of.get(letter, ()))
