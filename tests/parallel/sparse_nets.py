"""A model that makes sparse tensors in its forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

AT = ((0, 1, 2), (1, 2, 3))


class Spread(nn.Module):
    """Adds neighbors by a sparse matrix of its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.share = nn.Linear(6, 6), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        matrix = torch.sparse_coo_tensor(torch.tensor(AT, device=x.device), self.share, (6, 6))
        return self.lin(x) + torch.sparse.mm(matrix, x.T).T


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.spread, self.head = nn.Linear(6, 6), Spread(), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.spread(torch.tanh(self.a(x)))))


class Between(nn.Module):
    """Adds neighbors between its modules, by a constant sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        matrix = torch.sparse_coo_tensor(torch.tensor(AT, device=x.device), x.new_ones(3), (6, 6))
        return self.head(h + torch.sparse.mm(matrix, h.T).T)
