"""Views and writes in place, within stages and across them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.zoo.case import ABCD, Net, odd, sequence


@odd(*ABCD)
class BaseChanged(Net):
    """A view is taken, then its base is changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)) * 1.0
        view = h.view(-1, 2, 4)
        h.mul_(2)
        return self.d(self.c(view.flatten(1)) + h)


@odd(*ABCD)
class ViewChanged(Net):
    """A slice is changed in place, then its base is used."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)) * 1.0
        h[:, :4].mul_(0.5)
        return self.d(self.c(h))


@odd(*ABCD)
class BaseChangedAcross(Net):
    """A view of an early value, whose base is changed by a late module's result."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1.0
        view = h[:, ::2]
        g = self.c(self.b(h.detach().clone()))
        h.add_(g)
        return self.d(torch.cat([view, view], -1)) + h


@odd(*ABCD)
class ViewChangedAcross(Net):
    """A late module's result is written into a view of an early value."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).clone()
        g = self.c(self.b(x))
        h[:, 2:4] = g[:, :2]
        return self.d(h)


@odd(*ABCD)
class InplaceRelu(Net):
    """ReLU in place on a value from another stage."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.b(self.a(x)) * 1.0, inplace=True)
        return self.d(F.relu_(self.c(h) + h))


@odd(*ABCD)
class AddsInPlace(Net):
    """A residual stream by ``x += y``."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1.0
        h += self.b(h.clone())
        h += self.c(h.clone())
        return self.d(h)


@odd(*ABCD)
class AddsBesideClone(Net):
    """``x += y`` where y is computed from a clone of something else."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1.0
        h += self.b((h * 2).sin().clone())
        h += self.c((h * 3).sin().clone())
        return self.d(h)


@sequence(*ABCD)
class FirstPlace(Net):
    """``x[:, 0] = ...`` in the glue."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).clone()
        h[:, 0] = 0.0
        h = self.b(h).clone()
        h[:, 1] = h[:, 0] * 2
        return self.d(self.c(h))


@odd(*ABCD)
class BufferFilled(Net):
    """An output tensor is allocated first and filled by pieces from several stages."""

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 8)
        h = self.b(self.a(x))
        out[:, :4] = h[:, 4:]
        out[:, 4:] = self.c(h)[:, :4]
        return self.d(out)


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(1.1)
        return self.inner(x)


@odd("a", "b", "own", "d")
class ModuleWritesInput(Net):
    """A module changes its input in place, and the glue uses the input afterwards."""

    def extra(self) -> None:
        self.own = _InPlace()
        del self.c

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)) * 1.0
        return self.d(self.own(h) + h)


@odd(*ABCD)
class InputChanged(Net):
    """The model's own input is changed in place, and used again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x.clone()))
        x.sub_(1.0)
        return self.d(self.c(h) + x)


@sequence(*ABCD)
class Chunks(Net):
    """Views by chunk and unbind cross the cut, one of them changed."""

    def forward(self, x: Tensor) -> Tensor:
        p, q = (self.a(x) * 1.0).chunk(2, 1)
        q = q.clone()
        q.mul_(2)
        first, *_ = self.b(p).unbind(1)
        h = torch.cat([p, q], 1) + first[:, None]
        return self.d(self.c(h))


@odd(*ABCD)
class Expanded(Net):
    """A value that is expanded, not contiguous and transposed crosses the cut."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)[:, None].expand(-1, 8, -1).transpose(1, 2)
        h = self.b(h).transpose(1, 2)
        return self.d(self.c(h).mean(1))
