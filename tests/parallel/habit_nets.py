"""Nets with habits that are common in public code: each trains alike under every layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from tests.parallel.python_state_nets import Net


class _Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.habit(x))

    def habit(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _NoAutocast(_Layer):
    def habit(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return x * 2


class _NoAutocastOfDtype(_Layer):
    def habit(self, x: Tensor) -> Tensor:
        with torch.autocast(device_type=x.device.type, dtype=torch.bfloat16, enabled=False):
            return x * 2


class _ByLists(_Layer):
    def habit(self, x: Tensor) -> Tensor:
        x = x[:, [0, 1, 2, 5, 4, 3]] * x[:, ([5, 4, 3, 2, 1, 0])]
        out = x.clone()
        out[:, [0, 1]] = x[..., [[2], [3]]].sum(-1)
        return out


class _GradOfBuffer(_Layer):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale: Tensor
        self.register_buffer("scale", torch.full((6,), 0.5))

    def habit(self, x: Tensor) -> Tensor:
        return x * self.scale if self.scale.grad is None else x


class NoAutocast(Net):
    layer: Any = _NoAutocast

    def more(self) -> None:
        self.b = self.layer(6, 6)


class NoAutocastOfDtype(NoAutocast):
    layer = _NoAutocastOfDtype


class IndexedByLists(NoAutocast):
    layer = _ByLists


class GradOfBuffer(NoAutocast):
    layer = _GradOfBuffer


class Variables(nn.Module):
    """The code between the modules makes variables, with gradient and without."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(Variable(x))
        z = self.b(y) * Variable(y.data) + Variable(y)
        return self.head(z + Variable(torch.ones(6, dtype=x.dtype), requires_grad=True))


class BetweenModules(Variables):
    """The code between the modules has the habits of the modules above."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y = self.a(x)[:, [5, 4, 3, 2, 1, 0]] * 2
        return self.head(self.b(y))


class Autocast(Variables):
    """The code between the modules multiplies under autocast of its tensors' device."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.autocast(device_type=y.device.type, dtype=torch.bfloat16):
            z = torch.bmm(y[:, :, None], y[:, None, :])
        return self.head(self.b(z.float().sum(1)))
