"""Adafactor (Shazeer and Stern 2018), as in torch, for parameters that are split into pieces on ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from launcher.optim.sharded import TensorPieces, add_up


@dataclass(frozen=True)
class _Update:
    """One parameter in one step.

    ``square`` is the sum of the squares of its values: of this rank's piece first, of the full tensor after
    ``add_up``.
    """

    p: nn.Parameter
    grad: Tensor
    state: dict[str, Tensor]
    group: Mapping[str, Any]
    pieces: TensorPieces
    square: Tensor

    @property
    def kept(self) -> float:
        """The weight of a new value in the running means."""
        return float(self.state["step"].item() ** self.group["beta2_decay"])

    @property
    def factored(self) -> bool:
        return self.p.ndim > 1

    def direction(self, row_mean: Tensor | None) -> Tensor:
        """Returns the update of this rank's piece before scaling: the gradient over its root mean square.

        ``row_mean`` is the mean of the full ``row_var``.
        """
        least = self.group["eps"][0]
        if row_mean is None:
            variance = self.state["variance"].clone()
        else:
            variance = self.state["row_var"] @ self.state["col_var"]
            variance.div_(row_mean.clamp(min=least))
        return variance.clamp_(min=least * least).rsqrt_().mul_(self.grad)


class Adafactor(torch.optim.Optimizer):
    """Keeps the mean square of each row and column of a matrix, and of each element of a vector.

    Rows and columns are those of the last two dims. ``pieces`` says for each parameter which full tensor it
    is a piece of: row and column means, and root mean squares, are those of the full tensor. ``eps``, ``d``
    and ``beta2_decay`` are those of torch.
    """

    def __init__(self, params: Iterable[Any], lr: float, pieces: Mapping[nn.Parameter, TensorPieces]) -> None:
        super().__init__(params, {"lr": lr})
        self._pieces = pieces

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters together, so that their sums share collectives.

        Each update is computed twice, so that not all updates are in memory at once.
        """
        todo = list(self._begun())
        rows, columns = [], []
        terms: list[tuple[TensorPieces, Iterable[int] | None, Tensor]] = [
            (u.pieces, None, u.square) for u in todo
        ]
        for u in todo:
            if u.factored:
                rows.append(_squares(u.grad, -1))
                columns.append(_squares(u.grad, -2))
                terms += [(u.pieces, (-1,), rows[-1]), (u.pieces, (-2,), columns[-1])]
        add_up(terms)

        # the running means, and the mean of each column of row means
        means = self._averaged([u for u in todo if u.factored], rows, columns)
        for u in todo:
            if not u.factored:
                u.state["variance"].lerp_(u.grad * u.grad, u.kept)

        # the size of each update
        sizes = [_square(u.direction(means.get(u.p))) for u in todo]
        add_up((u.pieces, None, size) for u, size in zip(todo, sizes, strict=True))
        for u, size in zip(todo, sizes, strict=True):
            _apply(u, u.direction(means.get(u.p)), size)

    def _begun(self) -> Iterator[_Update]:
        """Yields the update of each parameter that has a gradient and is not empty."""
        for group in self.param_groups:
            for p in group["params"]:
                pieces = self._pieces[p]
                if p.grad is None or 0 in pieces.shape:
                    continue
                state = self.state[p]
                if not state:
                    state.update(_zeros(p))
                state["step"] += 1
                yield _Update(p, p.grad, state, group, pieces, _square(p))

    def _averaged(
        self, todo: list[_Update], rows: list[Tensor], columns: list[Tensor]
    ) -> dict[Tensor, Tensor]:
        """Updates the running means from sums of squares; returns the mean of each column of row means."""
        sums = {}
        for u, row, column in zip(todo, rows, columns, strict=True):
            u.state["row_var"].lerp_(row.div_(u.pieces.shape[-1]), u.kept)
            u.state["col_var"].lerp_(column.div_(u.pieces.shape[-2]), u.kept)
            sums[u.p] = u.state["row_var"].sum(dim=-2, keepdim=True)
        add_up((u.pieces, (-2,), sums[u.p]) for u in todo)
        return {u.p: sums[u.p].div_(u.pieces.shape[-2]) for u in todo}


def _zeros(p: Tensor) -> dict[str, Tensor]:
    """Returns the state of a piece before the first step."""
    step = torch.tensor(0.0, dtype=torch.float32)
    if p.ndim > 1:
        row, column = p.new_zeros((*p.shape[:-1], 1)), p.new_zeros((*p.shape[:-2], 1, p.shape[-1]))
        return {"step": step, "row_var": row, "col_var": column}
    return {"step": step, "variance": torch.zeros_like(p, memory_format=torch.preserve_format)}


def _apply(u: _Update, update: Tensor, size: Tensor) -> None:
    """Applies ``update``; ``size`` is the sum of the squares of the full update."""
    numbers, lr = prod(u.pieces.shape), u.group["lr"]
    rate = min(float(lr), 1 / u.state["step"].item() ** 0.5)
    step = (u.square / numbers).sqrt().clamp(min=u.group["eps"][1]) * rate
    limit = ((size / numbers).sqrt() / u.group["d"]).clamp(min=1.0)
    if u.group["weight_decay"]:
        u.p.mul_(1 - lr * u.group["weight_decay"])
    u.p.sub_(update.mul_((step / limit).to(update.dtype)))


def _square(t: Tensor) -> Tensor:
    """Returns the sum of squares in fp64: in fp32 a CPU's sum of a million has five correct digits."""
    norm: Tensor = torch.linalg.vector_norm(t, dtype=torch.float64)
    return norm.square()


def _squares(t: Tensor, dim: int) -> Tensor:
    """Returns the sum of squares along ``dim``, without a temporary of the size of ``t``."""
    norms: Tensor = torch.linalg.vector_norm(t, dim=dim, keepdim=True)
    return norms.square()
