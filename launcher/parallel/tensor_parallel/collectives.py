"""Collectives over the tensor-parallel axis, with their backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from launcher.errors import RunError
from launcher.plan.tensor_parallel.module_strategies import Cut
from launcher.plan.tensor_parallel.sharded_operators import Comm, ShardedOperator


class CollectiveResults:
    """The results of a forward's collectives, in order, so that a recomputation need not repeat them."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self._versions: list[int] = []
        self._next: int | None = None

    def again(self) -> None:
        """Begins a recomputation of the forward."""
        self._next = 0

    def of(self, send: Callable[[], Tensor]) -> Tensor:
        """Returns the result of ``send``, or in a recomputation the result kept at this place.

        Raises ``RunError`` if a kept result was changed in place.
        """
        if self._next is None:
            out = send()
            self.kept.append(out.detach())
            self._versions.append(out._version)
            return out
        t, version = self.kept[self._next], self._versions[self._next]
        self._next += 1
        if t._version != version:
            text = (
                "a result of a collective over tp was changed in place, but recomputation needs the original"
            )
            raise RunError(f"{text} (try: parallel.recompute.comm=recompute)")
        return t.detach()


@dataclass(frozen=True)
class Sending:
    """A collective that may still run; ``made`` returns its result once it is done."""

    work: dist.Work | None
    made: Callable[[], Tensor]

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.made()


@dataclass
class Axis:
    """The ranks that share an operator. On meta tensors, and when ``planned``, only shapes are computed.

    Attributes:
        planned: whether no rank has joined yet.
        bias_in_terms: that of ``TensorParallelPlan``.
        log: collects what one pass would send, if a list is set.
        last: the last tensor that ``bring`` has converted, with its key and the result.
        results: collects the results of a forward's collectives, if they are kept for its recomputation.
        overwritten: whether the tensor of ``last`` was changed in place and then converted again.
        number: identifies the axis in this process.
    """

    size: int
    rank: int = 0
    group: dist.ProcessGroup | None = None
    planned: bool = False
    bias_in_terms: bool = False
    log: list[Comm] | None = field(default=None, compare=False)
    last: tuple[Tensor, tuple[Any, ...], Tensor] | None = field(default=None, compare=False)
    results: CollectiveResults | None = field(default=None, compare=False)
    overwritten: bool = field(default=False, compare=False)
    number: int = field(default_factory=count().__next__, compare=False)

    def __post_init__(self) -> None:
        AXES[self.number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a process group has no copy

    def join(self, rank: int, group: dist.ProcessGroup | None) -> None:
        """Runs the planned model on ``rank`` from now on."""
        assert self.planned, "it has joined before: a blueprint serves one build"
        self.rank, self.group, self.planned, self.last = rank, group, False, None

    def record(self, op: str, phase: str, x: Tensor, times: int = 1) -> None:
        if self.log is not None:
            self.log.append(Comm(op, phase, x.numel() * x.element_size() * times))

    def silent(self, x: Tensor) -> bool:
        """Returns true if nothing is sent for ``x``."""
        return self.planned or x.is_meta

    def once(self, send: Callable[[], Tensor]) -> Tensor:
        """Returns the result of a forward's collective ``send``, or in a recomputation the kept result."""
        return send() if self.results is None else self.results.of(send)

    def piece(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's part of a full tensor."""
        return x.chunk(self.size, dim)[self.rank].contiguous()

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Returns the full tensor, from every rank's part."""
        if torch.compiler.is_compiling():
            out: Tensor = _gather(x, self.number, dim)
            return out
        return self.start_gather(x, dim, later=False).wait()

    def start_gather(self, x: Tensor, dim: int, later: bool) -> Sending:
        """Starts ``gather``; with ``later`` the caller continues before it is done."""
        if self.silent(x):
            return Sending(None, lambda: torch.cat([x] * self.size, dim))
        parts = [torch.empty_like(x) for _ in range(self.size)]
        work = dist.all_gather(parts, x.contiguous(), group=self.group, async_op=later)
        return Sending(work, lambda: torch.cat(parts, dim))

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum over the ranks, on each of them."""
        if torch.compiler.is_compiling():
            out: Tensor = _sum(x, self.number)
            return out
        return self.start_sum(x, later=False).wait()

    def start_sum(self, x: Tensor, later: bool) -> Sending:
        """Starts ``sum``; ``later`` as in ``start_gather``."""
        out = x.clone(memory_format=torch.contiguous_format)
        silent = self.silent(x)
        work = None if silent else dist.all_reduce(out, group=self.group, async_op=later)
        return Sending(work, lambda: out)

    def top(self, x: Tensor) -> Tensor:
        """Returns the elementwise maximum over the ranks."""
        out = x.clone(memory_format=torch.contiguous_format)
        if not self.silent(x):
            dist.all_reduce(out, op=dist.ReduceOp.MAX, group=self.group)
        return out

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's part of the sum over the ranks."""
        if torch.compiler.is_compiling():
            out: Tensor = _scatter(x, self.number, dim)
            return out
        return self.start_scatter(x, dim, later=False).wait()

    def start_scatter(self, x: Tensor, dim: int, later: bool) -> Sending:
        """Starts ``scatter``; ``later`` as in ``start_gather``."""
        parts = [p.contiguous() for p in x.chunk(self.size, dim)]
        if self.silent(x):
            return Sending(None, lambda: parts[0])
        out = torch.empty_like(parts[self.rank])
        work = dist.reduce_scatter(out, parts, group=self.group, async_op=later)
        return Sending(work, lambda: out)


AXES: WeakValueDictionary[int, Axis] = WeakValueDictionary()
"""The axes by number: a compiled graph refers to an axis by its number."""


@torch.library.custom_op("launcher::tp_gather", mutates_args=())
def _gather(x: Tensor, axis: int, dim: int) -> Tensor:
    return AXES[axis].gather(x, dim)


@_gather.register_fake
def _(x: Tensor, axis: int, dim: int) -> Tensor:
    return torch.cat([x] * AXES[axis].size, dim)


@torch.library.custom_op("launcher::tp_sum", mutates_args=())
def _sum(x: Tensor, axis: int) -> Tensor:
    return AXES[axis].sum(x)


@_sum.register_fake
def _(x: Tensor, axis: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("launcher::tp_scatter", mutates_args=())
def _scatter(x: Tensor, axis: int, dim: int) -> Tensor:
    return AXES[axis].scatter(x, dim)


@_scatter.register_fake
def _(x: Tensor, axis: int, dim: int) -> Tensor:
    here = AXES[axis]
    return torch.empty_like(x.chunk(here.size, dim)[here.rank], memory_format=torch.contiguous_format)


COLLECTIVES = frozenset({"tp_gather", "tp_sum", "tp_scatter"})
"""The names of the custom operations above."""


class _Enter(Function):
    """Passes a full tensor in; the gradient is summed, because each rank has a term of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.axis.sum(grad), None


class _Leave(Function):
    """Sums the terms on the way out; the gradient is full already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.once(lambda: axis.sum(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Bias(Function):
    """Adds the bias of a sum to one rank's term; its gradient is that of the sum, which each rank has."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, bias: Tensor, mine: bool) -> Tensor:
        ctx.shape = bias.shape
        return term + bias if mine else term.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad.sum_to_size(ctx.shape), None


class _Gather(Function):
    """Gathers parts; the backward takes this rank's part of the gradient, summed if ranks have terms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, terms: bool) -> Tensor:
        ctx.axis, ctx.dim, ctx.terms = axis, dim, terms
        return axis.once(lambda: axis.gather(x, dim))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        axis, dim = ctx.axis, ctx.dim
        return (axis.scatter(grad, dim) if ctx.terms else axis.piece(grad, dim)), None, None, None


class _Piece(Function):
    """Takes a part of a full tensor, or (``terms``) of the sum; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, terms: bool) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.once(lambda: axis.scatter(x, dim)) if terms else axis.piece(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.axis.gather(grad, ctx.dim), None, None, None


@dataclass(frozen=True)
class SendingInput:
    """How a tensor enters an operator that sends its gradient in the backward, by the collective ``op``.

    ``dim`` is the dim along which the tensor is gathered on its way in, or of which a rank takes a piece.
    """

    op: str
    axis: Axis
    dim: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Returns the tensor that the operator takes."""
        match self.op:
            case "all_reduce":
                return x.detach()
            case "reduce_scatter":
                return self.axis.once(lambda: self.axis.gather(x, self._dim))
            case _:
                return self.axis.piece(x, self._dim)

    def start(self, grad: Tensor, later: bool) -> Sending:
        """Starts to send the gradient."""
        match self.op:
            case "all_reduce":
                return self.axis.start_sum(grad, later)
            case "reduce_scatter":
                return self.axis.start_scatter(grad, self._dim, later)
            case _:
                return self.axis.start_gather(grad, self._dim, later)

    @property
    def _dim(self) -> int:
        assert self.dim is not None
        return self.dim


Enter = Callable[[Tensor, SendingInput], Tensor]
"""Converts an operator's input in place of ``bring``, and sends its gradient."""


def bring(
    x: Tensor, arrives: Cut, takes: Cut, axis: Axis, *, terms: bool, enter: Enter | None = None
) -> Tensor:
    """Converts ``x`` from the layout ``arrives`` to ``takes``, which the operator needs.

    ``terms``: each rank's gradient will be a term of the sum, not the full gradient. ``enter`` is called if
    the gradient needs a collective. Successive operators on one tensor share the collective: q, k and v enter
    together, and their gradients are summed once.
    """
    if arrives == takes and not (takes is None and terms):
        return x
    if takes is None:
        # a graph cannot read versions, so the plan refuses to compile code that changes the input between
        # two operators
        version = 0 if torch.compiler.is_compiling() else x._version
        key = (version, arrives, terms, torch.is_grad_enabled())
        same = axis.last is not None and axis.last[0] is x
        if axis.last is not None and same and axis.last[1] == key:
            return axis.last[2]
        if axis.last is not None and same and axis.last[1][0] != version:
            axis.overwritten = True
        brought = _into(x, arrives, axis, terms, enter)
        axis.last = (x, key, brought)
        return brought
    if arrives is not None:
        x = _into(x, arrives, axis, terms=False)
    axis.record("all_gather", "backward", x)
    if enter is not None:
        return enter(x, SendingInput("all_gather", axis, takes))
    return _Piece.apply(x, axis, takes, False)  # type: ignore[no-any-return, no-untyped-call]


def _into(x: Tensor, arrives: Cut, axis: Axis, terms: bool, enter: Enter | None = None) -> Tensor:
    if arrives is None:
        axis.record("all_reduce", "backward", x)
        if enter is not None:
            return enter(x, SendingInput("all_reduce", axis))
        return _Enter.apply(x, axis)  # type: ignore[no-any-return, no-untyped-call]
    axis.record("all_gather", "forward", x, axis.size)
    if terms:
        axis.record("reduce_scatter", "backward", x, axis.size)
        if enter is not None:
            return enter(x, SendingInput("reduce_scatter", axis, arrives))
    return _Gather.apply(x, axis, arrives, terms)  # type: ignore[no-any-return, no-untyped-call]


def with_bias(term: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    """Adds ``bias`` once to the sum over ``axis``; ``term`` is this rank's term of the sum."""
    return _Bias.apply(term, bias, axis.rank == 0)  # type: ignore[no-any-return, no-untyped-call]


def hand(y: Tensor, spread: ShardedOperator, axis: Axis) -> Tensor:
    """Converts ``y`` to the layout of the output: sum terms, leave split tensors split or gathers them."""
    axis.last = None
    if not spread.sums:
        return bring(y, spread.makes, spread.gives, axis, terms=False)
    if spread.gives is None:
        axis.record("all_reduce", "forward", y)
        return _Leave.apply(y, axis)  # type: ignore[no-any-return, no-untyped-call]
    axis.record("reduce_scatter", "forward", y)
    axis.record("all_gather", "backward", y)
    return _Piece.apply(y, axis, spread.gives, True)  # type: ignore[no-any-return, no-untyped-call]
