"""Models whose samples depend on one another in few batches only, with their data."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset

LENGTH, EVERY = 12, 50


class Sequences(TensorDataset):
    """One of ``EVERY`` sequences is short, from the eighth on. No token is ``padding``."""

    def __init__(self, samples: int, padding: int = 0) -> None:
        stream = torch.Generator().manual_seed(0)
        lengths = torch.full((samples,), LENGTH)
        lengths[7::EVERY] = 4
        tokens = torch.randint(1, 24, (samples, LENGTH), generator=stream)
        tokens[tokens == padding] = 5
        tokens = torch.where(torch.arange(LENGTH) < lengths[:, None], tokens, padding)
        super().__init__(tokens, lengths, torch.randint(0, 3, (samples,), generator=stream))


class Tokens(Sequences):
    """Sequences without their lengths."""

    def __init__(self, samples: int, padding: int = 0) -> None:
        super().__init__(samples, padding)
        self.tensors = (self.tensors[0], self.tensors[2])


class Numbers(TensorDataset):
    """One of ``EVERY`` samples has a large number, from the eighth on."""

    def __init__(self, samples: int) -> None:
        stream = torch.Generator().manual_seed(0)
        x = torch.randn(samples, 6, generator=stream).clamp(-3, 3)
        x[7::EVERY, 2] = -4
        super().__init__(x, torch.randint(0, 3, (samples,), generator=stream))


class Packed(nn.Module):
    """Its mean is over the positions of the longest sequence of the batch."""

    def __init__(self, padding: int = 0) -> None:
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(24, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)
        self.padding = padding

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            lengths = (x != self.padding).sum(1)
        packed = pack_padded_sequence(self.table(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(torch.tanh(out).mean(1))


class Bounded(nn.Module):
    """Divides by the largest number of the batch, if that passes a bound."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x / x.detach().abs().max().clamp(min=3.2)
        return self.head(torch.tanh(self.a(x)))
