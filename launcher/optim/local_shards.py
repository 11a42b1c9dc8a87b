"""Runs an optimizer that knows only plain tensors on this rank's shards of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class LocalShards(torch.optim.Optimizer):
    """Gives ``inner`` this rank's pieces of the parameters; its update must be elementwise.

    A user-defined class need not know DTensor, nor be limited to operations that have a rule for it. The
    pieces share memory with the parameters; gradients are passed to them before a step.
    """

    def __init__(
        self, build: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer], params: Sequence[nn.Parameter]
    ) -> None:
        """Build ``inner``.

        The base class is not initialised, as groups, state and hooks are those of ``inner``.
        """
        self._own = {p: _piece(p) for p in params}
        self.inner = build(list(self._own.values()))
        self.register_step_pre_hook = self.inner.register_step_pre_hook  # type: ignore[method-assign]
        self.register_step_post_hook = self.inner.register_step_post_hook  # type: ignore[method-assign]

    def own(self, p: Tensor) -> Tensor:
        """Return the piece of ``p``, or ``p`` itself if it is not trained."""
        return self._own.get(p, p)  # type: ignore[call-overload, no-any-return]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, piece in self._own.items():
            piece.grad = _grad(p)
        self.inner.step()
        with torch.no_grad():
            for p, piece in self._own.items():
                held = _local(p.detach())
                if piece.data_ptr() != held.data_ptr():  # the optimizer has replaced p.data
                    held.copy_(piece)
                    piece.data = held

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)
        for p in self._own:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()


def _piece(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(_local(p.detach())) if isinstance(p, DTensor) else p


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _grad(p: Tensor) -> Tensor | None:
    """Return this rank's piece of the gradient, with the placements of the parameter.

    After tensor parallelism the gradient may have others.
    """
    g = p.grad
    if isinstance(g, DTensor) and isinstance(p, DTensor) and g.placements != p.placements:
        g = g.redistribute(placements=p.placements)
    return None if g is None else _local(g)
