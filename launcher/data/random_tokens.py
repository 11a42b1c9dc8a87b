"""Random tokens, generated when they are read."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from launcher.data.feistel import mix
from launcher.data.shuffle import Indices
from launcher.data.source import Dataset, Source, entropy
from launcher.job.schema.components import RandomTokens

VAL_SHARE = 10  # training samples per validation sample


class Noise(Source):
    """Sample ``i`` is ``seq_len`` tokens drawn from (seed, ``first + i``); its target is one token later."""

    def __init__(self, settings: RandomTokens, seed: int, first: int, samples: int) -> None:
        self.vocab_size, self.seq_len = settings.vocab_size, settings.seq_len
        self.first, self.samples = first, samples
        self.key = np.random.SeedSequence(seed).generate_state(1, np.uint64)

    def __len__(self) -> int:
        return self.samples

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        return (self._draw(indices)[:, :-1].contiguous(),)

    def targets(self, indices: Indices) -> Tensor:
        return self._draw(indices)[:, 1:].contiguous()

    def _draw(self, indices: Indices) -> Tensor:
        row = self.seq_len + 1
        counters = (self.first + indices[:, None]) * row + np.arange(row)
        bits = mix(counters.astype(np.uint64) + self.key)
        return torch.from_numpy((bits % np.uint64(self.vocab_size)).astype(np.int64))


def open_random_tokens(settings: RandomTokens, seed: int) -> Dataset:
    val = Noise(settings, seed, settings.samples, max(settings.samples // VAL_SHARE, 1))
    return Dataset(Noise(settings, seed, 0, settings.samples), val, entropy(val))
