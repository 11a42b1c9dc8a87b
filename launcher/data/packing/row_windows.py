"""Windows over one long sequence of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher.data.shuffle import Indices
from launcher.data.source import Source


class Windows(Source):
    """Sample ``i`` is tokens ``[i * seq_len, (i + 1) * seq_len)``; its target is one token later."""

    def __init__(self, tokens: NDArray[Any], seq_len: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.seq_len

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        return (self._read(indices, 0),)

    def targets(self, indices: Indices) -> Tensor:
        return self._read(indices, 1)

    def _read(self, indices: Indices, shift: int) -> Tensor:
        at = indices[:, None] * self.seq_len + np.arange(shift, shift + self.seq_len)
        return torch.from_numpy(self.tokens[at].astype(np.int64))
