"""Nets with a module that looks at data and returns Python values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Returns(nn.Linear):
    def more(self, h: Tensor) -> Any:
        return 1

    def forward(self, x: Tensor) -> Any:
        h = super().forward(x)
        assert bool(h.isfinite().all())
        return h, self.more(h)


class Sums(Returns):
    def more(self, h: Tensor) -> Any:
        return {"total": h.detach().abs().sum().item()}


class Counts(Returns):
    def more(self, h: Tensor) -> Any:
        return int((h > 50).sum())


class Rows(Returns):
    def more(self, h: Tensor) -> Any:
        return [h[h[:, 0] > 0]]


class Sizes(Returns):
    """Returns numbers that are the same for any data."""

    def more(self, h: Tensor) -> Any:
        return 2, tuple(h.shape)


class Net(nn.Module):
    kind: type[Returns] = Sizes

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = self.kind(6, 6), nn.Linear(6, 3)

    def use(self, made: Any) -> Any:
        return made[0]

    def forward(self, x: Tensor) -> Tensor:
        h, made = self.a(x)
        return self.head(h * self.use(made))


class Sized(Net):
    """The code after the module uses the returned value as a number."""


class Summed(Net):
    kind = Sums

    def use(self, made: Any) -> Any:
        return made["total"]


class Counted(Net):
    kind = Counts

    def use(self, made: Any) -> Any:
        return 1 + made


class Picked(Net):
    kind = Rows

    def use(self, made: Any) -> Any:
        return torch.tanh(made[0].sum())


class SummedUnderAutocast(Net):
    """The code after the module uses a sum; the module runs under autocast."""

    kind = Sums

    def use(self, made: Any) -> Any:
        return made["total"]

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h, made = self.a(x)
        return self.head(h.to(x.dtype) * self.use(made))
