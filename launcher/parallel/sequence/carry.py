"""Carries state from earlier pieces of a sequence to later ones, and gradients back exactly.

A module that mixes positions can run a sequence in pieces when it has a method

    piece(self, *inputs, start: int, past: Sequence[tuple[Tensor, ...]]) -> tuple[output, tuple[Tensor, ...]]

``inputs`` are those of ``forward``, for the positions from ``start`` on; ``past`` has one tuple a piece
before this one, in order: what ``piece`` returned for it as its second value (keys and values, say). One
piece with no past is ``forward``. Modules that treat every position alike need nothing; one that is not
recognised as such says ``positionwise = True``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

Kept = tuple[Tensor, ...]


@runtime_checkable
class Pieced(Protocol):
    """A module that can run a sequence in pieces."""

    def forward(self, *inputs: Any) -> Any: ...
    def piece(self, *inputs: Any, start: int, past: Sequence[Kept]) -> tuple[Tensor, Kept]: ...


class Carry:
    """The state of one stage: which piece of which micro batch runs now, and what each has left.

    ``lengths`` are those of the pieces; outside of ``running`` modules run whole sequences.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.starts = tuple(sum(lengths[:q]) for q in range(len(lengths)))
        self.now: tuple[int, int] | None = None
        self.left: dict[int, dict[str, list[Kept]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Carry:
        """A copied model, as tracing makes, shares it."""
        return self

    @contextmanager
    def running(self, micro: int, piece: int) -> Iterator[None]:
        """Modules run this piece; the first one forgets what an earlier run of the micro batch has left."""
        if piece == 0:
            self.forget(micro)
        self.now = micro, piece
        try:
            yield
        finally:
            self.now = None

    def forget(self, micro: int, piece: int = 0) -> None:
        """A piece's backward is done: nobody needs what it has left, those after it went backward before."""
        for kept in self.left.get(micro, {}).values():
            del kept[piece:]
        if not piece:
            self.left.pop(micro, None)


def attach(model: nn.Module, carry: Carry) -> None:
    """Every module with ``piece`` asks ``carry`` what to run; what is around its forward stays around it."""
    for name, module in model.named_modules():
        if isinstance(module, Pieced):
            outer: Any = module.forward
            around = hasattr(outer, "plain")
            inner = partial(_forward, module, outer.plain if around else outer, name, carry)
            vars(module)["forward"] = replace(outer, plain=inner) if around else inner


def _forward(
    module: Any, plain: Callable[..., Any], name: str, carry: Carry, *inputs: Any, **named: Any
) -> Any:
    if carry.now is None:
        return plain(*inputs, **named)
    micro, piece = carry.now
    left = carry.left.setdefault(micro, {}).setdefault(name, [])
    del left[piece:]  # when the same piece runs again
    out, kept = module.piece(*inputs, **named, start=carry.starts[piece], past=tuple(left))
    if piece == len(carry.starts) - 1:
        return out
    leaves = tuple(t.detach().requires_grad_(t.requires_grad) for t in kept)
    left.append(leaves)
    if not any(t.requires_grad for t in kept):
        return out
    return _Later.apply(out, leaves, *kept)  # type: ignore[no-untyped-call]


class _Later(torch.autograd.Function):
    """Hands ``out`` on; backward gives each kept tensor the gradient that later pieces have left at its leaf.

    Later pieces go backward first, so it is whole by then.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, leaves: Kept, *kept: Tensor) -> Tensor:
        ctx.leaves = leaves
        ctx.save_for_backward(*kept)  # it is there until then: whoever counts what is saved is to see it
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads = [t.grad for t in ctx.leaves]
        for t in ctx.leaves:
            t.grad = None
        return (grad, None, *grads)
