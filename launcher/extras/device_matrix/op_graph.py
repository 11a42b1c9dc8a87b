"""The operators of a stage, and the values that they take and make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, Union

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
        """Returns the shapes of the tensors that it takes."""
        return tuple(self.values[v].shape for v in node.ins)

    def makes(self, node: OpNode) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the tensors that it makes."""
        return tuple(self.values[v].shape for v in node.outs)
