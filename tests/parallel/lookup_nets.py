"""Models that look up tokens; the number of rows of the table is a constructor argument."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from launcher.data.source import Source


class Net(nn.Module):
    def __init__(self, rows: int, shift: int = 0, bag: bool = False) -> None:
        super().__init__()
        self.shift = shift
        self.embed = nn.EmbeddingBag(rows, 6) if bag else nn.Embedding(rows, 6)
        self.head = nn.Linear(6, 9)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids + self.shift)
        return self.head(x[:, None].expand(-1, 6, -1) if x.dim() == 2 else x)


class Positions(Net):
    """Looks up tokens by indexing a parameter; ``looks``: also reads the data."""

    def __init__(self, rows: int, how: str, looks: bool = False) -> None:
        super().__init__(9)
        self.table, self.how, self.looks = nn.Parameter(torch.randn(rows, 6)), how, looks

    def forward(self, ids: Tensor) -> Tensor:
        if self.looks and bool((ids < -9).any()):
            raise ValueError("no ids")
        if self.how == "index":
            x = self.table[ids]
        elif self.how == "index_select":
            x = self.table.index_select(0, ids.reshape(-1)).view(*ids.shape, 6)
        else:
            x = self.table.gather(0, ids.reshape(-1, 1).expand(-1, 6)).view(*ids.shape, 6)
        return self.head(x)


class Ids(Source):
    """Ids up to 8, but one id of a late sample is ``late``."""

    def __init__(self, split: str, late: int = 8) -> None:
        self.split, self.late = split, late

    def __len__(self) -> int:
        return 32

    def inputs(self, indices: np.ndarray) -> tuple[Tensor, ...]:
        ids = (torch.from_numpy(np.asarray(indices))[:, None] + torch.arange(6)) % 9
        ids[torch.from_numpy(np.asarray(indices)) == 20, 4] = self.late
        return (ids,)

    def targets(self, indices: np.ndarray) -> Tensor:
        return self.inputs(indices)[0].clamp(0, 8)
