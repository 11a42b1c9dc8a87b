"""Lists, dictionaries and objects of the forward that its modules change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.zoo.case import ABCD, Net, block, odd


@dataclass
class _Pack:
    hidden: Tensor
    total: Tensor | float = 0.0


class _Updates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, pack: _Pack) -> _Pack:
        pack.hidden = self.net(pack.hidden)
        pack.total = pack.total + pack.hidden.mean()
        return pack


@odd(*ABCD)
class UpdatedDataclass(Net):
    """Modules change a dataclass and pass it on."""

    def extra(self) -> None:
        self.b, self.c = _Updates(), _Updates()

    def forward(self, x: Tensor) -> Tensor:
        pack = self.c(self.b(_Pack(self.a(x))))
        return self.d(pack.hidden) * (1 + pack.total)


class _Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, rows: list[Tensor], memo: dict[str, Any]) -> list[Tensor]:
        memo["seen"] = memo.get("seen", 0) + len(rows)
        memo.setdefault("sum", []).append(sum(r.mean() for r in rows))
        return [self.net(r) for r in rows]


@odd(*ABCD)
class SharedMemo(Net):
    """Modules write into a dictionary that the forward made, and it is read at the end."""

    def extra(self) -> None:
        self.b, self.c = _Rows(), _Rows()

    def forward(self, x: Tensor) -> Tensor:
        memo: dict[str, Any] = {}
        rows = self.c(self.b([self.a(x), x], memo), memo)
        return self.d(rows[0] + rows[1]) + torch.stack(memo["sum"]).sum() * memo["seen"]


class _Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        h: Tensor = self.net(x)
        losses.append(h.square().mean())
        return h


@odd(*ABCD)
class CollectedLosses(Net):
    """Modules append their losses to a list of the forward, which are summed at the end."""

    def extra(self) -> None:
        self.b, self.c = _Collects(), _Collects()

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        h = self.c(self.b(self.a(x), losses), losses)
        return self.d(h) * (1 + sum(losses))


class _Notes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor, notes: dict[str, Tensor]) -> Tensor:
        h: Tensor = self.net(x)
        notes["mean"] = h.mean() + notes.get("mean", 0)
        return h


@odd(*ABCD)
class NotedMean(Net):
    """Modules write a value into a dictionary, which is read with a default."""

    def extra(self) -> None:
        self.b, self.c = _Notes(), _Notes()

    def forward(self, x: Tensor) -> Tensor:
        notes: dict[str, Tensor] = {}
        h = self.c(self.b(self.a(x), notes), notes)
        return self.d(h) * (1 + notes.get("mean", 0))


class _Bag:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class _Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor, bag: _Bag) -> Tensor:
        h: Tensor = self.net(x)
        bag.kept.append(h)
        return h


@odd(*ABCD)
class FilledBag(Net):
    """Modules put values into an object of the forward."""

    def extra(self) -> None:
        self.b, self.c = _Fills(), _Fills()

    def forward(self, x: Tensor) -> Tensor:
        bag = _Bag()
        h = self.c(self.b(self.a(x), bag), bag)
        return self.d(h) + sum(bag.kept)
