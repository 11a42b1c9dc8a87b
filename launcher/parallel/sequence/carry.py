"""Carries state from earlier pieces of a sequence to later ones, and gradients back exactly.

A module that mixes positions can run a sequence in pieces if it has a method

    piece(self, *inputs, start: int, past: Sequence[tuple[Tensor, ...]]) -> tuple[output, tuple[Tensor, ...]]

``inputs`` are those of ``forward``, for the positions from ``start`` on. ``past`` has one tuple per earlier
piece, in order: the second value that ``piece`` returned for it (such as keys and values). A single piece
without past equals ``forward``. Modules that treat every position alike need nothing; a module that is not
recognised as such sets ``positionwise = True``.
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
    """The state of one stage: the piece and micro batch that run now, and what each piece has left.

    ``lengths`` are those of the pieces; outside of ``running`` modules run full sequences.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.starts = tuple(sum(lengths[:q]) for q in range(len(lengths)))
        self.now: tuple[int, int] | None = None
        self.repeats = False
        self.left: dict[int, dict[str, list[Kept]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Carry:
        """Return ``self``: a copied model, as tracing makes, shares the state."""
        return self

    @contextmanager
    def running(self, micro: int, piece: int) -> Iterator[None]:
        """Run modules on this piece; the first one drops what an earlier run of the micro batch has left."""
        if piece == 0:
            self.forget(micro)
        self.now = micro, piece
        try:
            yield
        finally:
            self.now = None

    @contextmanager
    def again(self, micro: int, piece: int) -> Iterator[None]:
        """Run modules on this piece once more, in its backward: what they leave exists already."""
        before = self.now, self.repeats
        self.now, self.repeats = (micro, piece), True
        try:
            yield
        finally:
            self.now, self.repeats = before

    def forget(self, micro: int, piece: int = 0) -> None:
        """Drop what a piece has left, after its backward; later pieces have had theirs before."""
        for kept in self.left.get(micro, {}).values():
            del kept[piece:]
        if not piece:
            self.left.pop(micro, None)


def attach(model: nn.Module, carry: Carry) -> None:
    """Make every module that has ``piece`` run the piece that ``carry`` says, inside wrappers of its forward.

    A wrapper has the forward as ``plain``; it gets ``carry`` if it has a field of that name.
    """
    for name, module in model.named_modules():
        if isinstance(module, Pieced) or "forward" in vars(module):
            vars(module)["forward"] = _attached(module.forward, module, name, carry)


def _attached(forward: Any, module: nn.Module, name: str, carry: Carry) -> Any:
    if not hasattr(forward, "plain"):
        return partial(_forward, module, forward, name, carry) if isinstance(module, Pieced) else forward
    told = {"carry": carry} if hasattr(forward, "carry") else {}
    return replace(forward, plain=_attached(forward.plain, module, name, carry), **told)


def _forward(
    module: Any, plain: Callable[..., Any], name: str, carry: Carry, *inputs: Any, **named: Any
) -> Any:
    if carry.now is None:
        return plain(*inputs, **named)
    micro, piece = carry.now
    left = carry.left.setdefault(micro, {}).setdefault(name, [])
    if not carry.repeats:
        del left[piece:]  # the same piece runs again

    # this piece, with what the pieces before it have left
    out, kept = module.piece(*inputs, **named, start=carry.starts[piece], past=tuple(left[:piece]))
    if piece == len(carry.starts) - 1:
        return out
    if not carry.repeats:
        left.append(tuple(t.detach().requires_grad_(t.requires_grad) for t in kept))

    # gradients of later pieces flow back through what is left for them
    if not any(t.requires_grad for t in kept):
        return out
    return _Later.apply(out, left[piece], *kept)  # type: ignore[no-untyped-call]


class _Later(torch.autograd.Function):
    """Returns ``out``; backward gives each kept tensor the gradient that later pieces have left at its leaf.

    Later pieces run their backward first, so the gradient is complete by then.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, leaves: Kept, *kept: Tensor) -> Tensor:
        ctx.leaves = leaves
        ctx.save_for_backward(*kept)  # it lives until then, so meters of saved tensors must see it
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads = [t.grad for t in ctx.leaves]
        for t in ctx.leaves:
            t.grad = None
        return (grad, None, *grads)
