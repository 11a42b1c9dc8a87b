"""Runs an operator on a rank's parts of its inputs, with the sizes of the parts among its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from launcher.extras.device_matrix.op_graph import Arg, Name, OpGraph, OpNode, Ref
from launcher.extras.device_matrix.op_rule import OpRule, OpStrategy

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LocalCall:
    """An operation on one rank.

    ``ins`` and ``outs`` have shapes of full tensors, ``rank`` is within the stage.

    ``dtype`` and ``strides`` are those of the first full tensor; ``strides`` is empty if it is row-major.
    """

    node: OpNode
    rule: OpRule
    strategy: OpStrategy
    ins: tuple[Shape, ...]
    outs: tuple[Shape, ...]
    rank: int
    dtype: str
    strides: tuple[int, ...] = ()

    @classmethod
    def from_node(
        cls, node: OpNode, graph: OpGraph, rule: OpRule, strategy: OpStrategy, rank: int
    ) -> LocalCall:
        first = graph.values[node.ins[0]] if node.ins else None
        made = graph.values[node.outs[0]].spec.dtype if node.outs else ""
        return cls(
            node=node,
            rule=rule,
            strategy=strategy,
            ins=graph.shapes(node),
            outs=graph.makes(node),
            rank=rank,
            dtype=first.spec.dtype if first is not None else made,
            strides=first.strides if first is not None else (),
        )

    @cached_property
    def local_outs(self) -> tuple[Shape, ...]:
        """The shapes of this rank's parts of the outputs."""
        layouts = [self.strategy.cut(letters) for letters in self.rule.outs]
        return tuple(x.local_shape(shape) for x, shape in zip(layouts, self.outs, strict=True))

    def axes(self, letters: tuple[str, ...]) -> tuple[int, ...]:
        """Returns the axes that split any of ``letters``."""
        return tuple(sorted({a for letter in letters if letter for a in self.strategy.of.get(letter, ())}))

    def ways(self, *letters: str) -> int:
        """Returns the number of parts into which ``letters`` are split together."""
        return prod(self.strategy.matrix[a] for a in self.axes(letters))

    def part(self, letter: str) -> int:
        """Returns which part of the dims with ``letter`` this rank has."""
        layout = self.strategy.cut((letter,) if letter else ())
        return layout.part(layout.dims[0], self.rank) if letter else 0

    def first(self, letters: tuple[str, ...]) -> bool:
        """Returns true if this rank has the first parts of all ``letters``."""
        return all(self.part(letter) == 0 for letter in letters)


SIZED = {
    "view", "reshape", "_unsafe_view", "unflatten", "expand", "broadcast_to",
    "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty",
}  # fmt: skip
"""Kinds with a list of sizes, which are those of their output."""
RESHAPES = {"view", "reshape", "_unsafe_view", "unflatten", "squeeze"}
END = 2**63 - 1


def local_arguments(call: LocalCall) -> tuple[str, tuple[Arg, ...]]:
    """Returns the operator to run, and its positional arguments."""
    op, kind, args = call.node.op, call.node.kind, call.node.args
    if op == "view.dtype":
        return op, args
    if kind in RESHAPES:
        # a part need not be contiguous, and squeeze must keep a dim of which one element is on this rank
        return "reshape", (args[0], call.local_outs[0])
    if kind in SIZED:
        place = 0 if not call.node.ins else 1
        return op, replaced(args, place, call.local_outs[0])
    if kind in ("slice", "narrow") and call.ins == call.outs:
        return "slice.Tensor", (args[0], 0, 0, END, 1)
    if kind == "group_norm":
        return op, _divided(args, 1, call.ways("c"))
    if kind.startswith("conv") and len(args) > 6:
        return op, _divided(args, 6, call.ways("g"))
    if kind in ("triu", "tril"):
        return op, (args[0], _diagonal(call))
    if kind == "repeat_interleave":
        return op, args[:3]
    return op, args


def replaced(args: tuple[Arg, ...], place: int, value: Arg) -> tuple[Arg, ...]:
    return (*args[:place], value, *args[place + 1 :])


def _divided(args: tuple[Arg, ...], place: int, ways: int) -> tuple[Arg, ...]:
    number = args[place]
    assert isinstance(number, int)
    return replaced(args, place, number // ways)


def _diagonal(call: LocalCall) -> int:
    """Returns the diagonal in a part, whose (i, j) is (i + rows before, j + columns before) in the tensor."""
    diagonal = call.node.args[1] if len(call.node.args) > 1 else 0
    rows, columns = call.rule.outs[0][-2:]
    height, width = call.local_outs[0][-2:]
    assert isinstance(diagonal, int)
    return diagonal + call.part(rows) * height - call.part(columns) * width


Run = Callable[..., Any]
"""Takes the tensors of an operator in order; returns what the operator returns."""


def torch_op(op: str) -> Any:
    """Converts ``add.Tensor`` to ``torch.ops.aten.add.Tensor``."""
    space, separator, name = op.rpartition("::")
    kind, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, space if separator else "aten"), kind)
    return getattr(packet, overload or "default")


def own_op(call: LocalCall, device: torch.device) -> Run:
    """Returns the operator itself, on parts."""
    op, args = local_arguments(call)
    if op == "copy":
        return _copy
    return bound(torch_op(op), args, dict(call.node.kwargs), device)


def _copy(x: Tensor, source: Tensor) -> Tensor:
    """Copies as ``aten::copy`` does, with a gradient."""
    return torch.empty_like(x).copy_(source)


def bound(op: Any, args: Sequence[Arg], kwargs: dict[str, Arg], device: torch.device) -> Run:
    """Returns ``op`` with all non-tensor arguments bound; it takes the tensors in order."""
    fixed = {key: constant(v, device) for key, v in kwargs.items() if not _tensors(v)}
    lead = next((i for i, a in enumerate(args) if not isinstance(a, Ref)), len(args))
    if len(fixed) == len(kwargs) and not any(_tensors(a) for a in args[lead:]):
        return _leading(op, lead, tuple(constant(a, device) for a in args[lead:]), fixed)

    template = [_template(a, device) for a in args]
    named = {key: _template(v, device) for key, v in kwargs.items() if key not in fixed}

    def run(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        filled = [_filled(a, rest) for a in template]
        return op(*filled, **{k: _filled(v, rest) for k, v in named.items()}, **fixed)

    return run


def _leading(op: Any, count: int, after: tuple[Any, ...], fixed: dict[str, Any]) -> Run:
    """Returns the fast form for most operators: tensors first, then constants."""
    if not after and not fixed:
        return lambda *tensors: op(*tensors)
    return lambda *tensors: op(*tensors, *after, **fixed)


class _Tensor:
    """Marks the place of a tensor among arguments."""


def _template(arg: Arg, device: torch.device) -> Any:
    if isinstance(arg, Ref):
        return _Tensor
    if isinstance(arg, tuple) and _tensors(arg):
        return [_template(a, device) for a in arg]
    return constant(arg, device)


def _filled(template: Any, rest: Any) -> Any:
    if template is _Tensor:
        return next(rest)
    if isinstance(template, list):
        return [_filled(t, rest) for t in template]
    return template


def _tensors(arg: Arg) -> bool:
    return isinstance(arg, Ref) or (isinstance(arg, tuple) and any(_tensors(a) for a in arg))


def constant(arg: Arg, device: torch.device) -> Any:
    """Returns torch's value for an argument of a recording; every device becomes ``device``."""
    if isinstance(arg, tuple):
        return tuple(constant(a, device) for a in arg)
    if isinstance(arg, Name):
        space, _, name = arg.text.partition(".")
        return getattr(torch, name) if space == "torch" else device
    return arg


class Collectives(Protocol):
    """Collectives over the ranks that differ from this one along ``axes`` of a device ``matrix`` only."""

    def sum(self, x: Tensor, matrix: tuple[int, ...], axes: tuple[int, ...]) -> Tensor:
        """Returns a new tensor on each of these ranks: the sum over them."""

    def max(self, x: Tensor, matrix: tuple[int, ...], axes: tuple[int, ...]) -> Tensor:
        """Returns a new tensor on each of these ranks: the maximum over them."""


@dataclass(frozen=True)
class Meeting:
    """The ranks that communicate inside of an operator."""

    here: Collectives
    matrix: tuple[int, ...]
    axes: tuple[int, ...]

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum, without a gradient."""
        return self.here.sum(x.contiguous(), self.matrix, self.axes) if self.axes else x

    def max(self, x: Tensor) -> Tensor:
        """Returns the maximum, without a gradient."""
        return self.here.max(x.contiguous(), self.matrix, self.axes) if self.axes else x

    def sum_for_all(self, x: Tensor) -> Tensor:
        """Returns a sum from which each rank computes the same: its gradient is that of each term."""
        if not self.axes:
            return x
        return _SumForAll.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]


class _SumForAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, meeting: Meeting) -> Tensor:
        return meeting.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
