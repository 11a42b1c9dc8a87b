"""Operators with collectives inside, each in a module of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LogSumExp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.logsumexp(-1, keepdim=True)


class Narrow(nn.Module):
    """Softmax in another dtype than that of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x, -1, dtype=torch.float32)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.batch, self.layer = nn.BatchNorm1d(16), nn.LayerNorm(16)
        self.rms = nn.RMSNorm(16, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rms(self.layer(self.batch(self.first(x)))))


class Softmaxes(nn.Module):
    """Several softmaxes; the second gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.soft, self.still, self.log = nn.Softmax(-1), nn.Softmax(-1), nn.LogSoftmax(-1)
        self.sum, self.narrow = LogSumExp(), Narrow()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.log(x.detach())
        return self.last(self.soft(x) + self.still(x.detach()) + self.log(x) + self.sum(x) + self.narrow(x))


class Losses(nn.Module):
    """Losses inside a model are operators like others: plain, weighted, smoothed, summed, and of probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.log = nn.LogSoftmax(-1)
        self.plain, self.added = nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(reduction="sum")
        self.each, self.soft = nn.CrossEntropyLoss(reduction="none"), nn.CrossEntropyLoss()
        self.weighted, self.nll = nn.CrossEntropyLoss(torch.rand(16)), nn.NLLLoss(torch.rand(16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.first(x)
        own = self.plain(scores, y) + self.added(scores, y) + self.each(scores, y).mean() + self.weighted(scores, y)
        own = own + self.nll(self.log(scores), y) + self.soft(scores, scores.detach().softmax(-1))
        return self.last(scores) + own


class HalfIdle(nn.Module):
    """The first layer is frozen, one branch is unused, and one layer is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.branch, self.idle = nn.Linear(16, 16), nn.Linear(8, 8)
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.branch(x)
        return self.last(x)
