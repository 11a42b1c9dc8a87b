"""Modules whose Python reads lengths, ids and values of the data, and data without zeros for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from launcher.data.source import Source


class Sentences(Source):
    """Ids of at least 1, and the length of each sentence: 1 to 6."""

    def __init__(self, split: str) -> None:
        self.split = split

    def __len__(self) -> int:
        return 48

    def inputs(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        at = torch.from_numpy(np.asarray(indices)).long()
        return 1 + (at[:, None] + torch.arange(6)) % 7, 1 + at % 6

    def targets(self, indices: np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(indices)).long() % 5


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.GRU(6, 6, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]


class Last(Packed):
    """The last state of each sequence, which has a fixed shape."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(x, lengths)[torch.arange(len(x)), lengths - 1]


class Trimmed(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x[:, : int(lengths.max())]


class Masked(nn.Module):
    """Cuts its input to the longest sequence and refuses an empty one."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if int(lengths.min()) < 1:
            raise ValueError("an empty sentence")
        return x[:, : int(lengths.max())]


class Net(nn.Module):
    """``inner`` is a module above; its output is averaged over as many positions as it returns."""

    def __init__(self, inner: str) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(8, 6), globals()[inner]()
        self.mix, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.inner(self.embed(ids), self.counted(ids, lengths))
        x = torch.tanh(self.mix(x))
        return self.head(x if x.dim() == 2 else x.sum(1) / x.shape[1])

    def counted(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return lengths


class Counted(Net):
    """Its lengths are computed from the ids."""

    def counted(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return (ids > 3).sum(1).clamp(min=lengths.min())


class Stacked(Net):
    """Packs sequences in its own forward and passes them from one recurrent layer to another."""

    def __init__(self, inner: str) -> None:
        super().__init__(inner)
        self.inner = nn.ModuleList(nn.GRU(6, 6, batch_first=True) for _ in range(2))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        for layer in self.inner:
            packed, last = layer(packed)
        return self.head(torch.tanh(self.mix(last[-1])))


class Scaled(nn.Module):
    """Divides by a value of its input, which must not be all zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        assert float(x.detach().abs().sum()) > 0
        scale = 127 / x.detach().abs().max().item()
        return self.head(x + ((x * scale).round() / scale - x).detach())
