"""The operators of a stage in the order in which they run, on whole tensors: what strategies are given to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, Union

from launcher.plan.values.facts import TensorSpec


@dataclass(frozen=True)
class Ref:
    """A tensor among the arguments of an operator: the place of its value in the graph."""

    value: int


@dataclass(frozen=True)
class Name:
    """A constant that is no number, list or text: a dtype, a device, a memory format, as torch writes it."""

    text: str


Arg: TypeAlias = Union[Ref, Name, bool, int, float, complex, str, "tuple[Arg, ...]", None]


@dataclass(frozen=True)
class Value:
    """One tensor of a graph. ``trains``: a gradient goes back to it. ``strides``: unless it is row-major.

    In the order of memory random numbers are drawn for a tensor.
    """

    spec: TensorSpec
    trains: bool
    strides: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape


@dataclass(frozen=True)
class OpNode:
    """One call of torch's operator ``op``, such as ``linear`` or ``add.Tensor``, on whole tensors.

    ``module``: the module whose code calls it, "" for the model's own. ``outs``: the values it makes.
    """

    op: str
    module: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outs: tuple[int, ...]

    @cached_property
    def ins(self) -> tuple[int, ...]:
        """The values it takes, in the order of its arguments, each as often as it is there."""
        return tuple(_refs((*self.args, *(v for _, v in self.kwargs))))

    @property
    def kind(self) -> str:
        """Without the overload: ``linear``."""
        return self.op.partition(".")[0]

    def kwarg(self, name: str, otherwise: Arg = None) -> Arg:
        return dict(self.kwargs).get(name, otherwise)


def _refs(arg: Arg) -> Iterator[int]:
    if isinstance(arg, Ref):
        yield arg.value
    elif isinstance(arg, tuple):
        for a in arg:
            yield from _refs(a)


@dataclass(frozen=True)
class OpGraph:
    """``inputs`` and ``outputs`` are values, as are ``params``: parameters and buffers by first name.

    ``buffers`` are the names of the latter; ``changes``: those that a forward changes, and what into.
    """

    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    params: tuple[tuple[str, int], ...]
    nodes: tuple[OpNode, ...]
    outputs: tuple[int, ...]
    buffers: frozenset[str] = frozenset()
    changes: tuple[tuple[str, int], ...] = ()

    def shapes(self, node: OpNode) -> tuple[tuple[int, ...], ...]:
        """Of the tensors that it takes."""
        return tuple(self.values[v].shape for v in node.ins)

    def makes(self, node: OpNode) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors that it makes."""
        return tuple(self.values[v].shape for v in node.outs)
