"""The interface of data sets, and random tokens as the simplest data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from launcher.data.shuffle import Indices, batch_indices, in_epochs, in_order, mix
from launcher.job.schema.data import RandomTokens

CHUNK = 1024
Reading = Literal["shuffled", "in epochs", "in order"]
"""The order in which training samples are read.

``"shuffled"``: the seed shuffles them. ``"in epochs"``: the seed shuffles them, but a sample may differ in
each epoch, and its index is ``epoch * len + sample``. ``"in order"``: they are not shuffled, and their number
may be unlimited.
"""


class Source(ABC):
    """One split of a data set. Any rank can read any sample; all ranks read the same values."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of samples."""

    @abstractmethod
    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        """Returns the arguments of the model's forward, samples along dim 0, in the order of ``indices``."""

    @abstractmethod
    def targets(self, indices: Indices) -> Tensor:
        """Returns the targets of the loss, samples along dim 0, in the order of ``indices``."""


@dataclass(frozen=True)
class Dataset:
    """The training and validation data.

    ``val`` may be empty; ``entropy`` is the entropy of its targets. Text has ``encode`` and ``decode``.
    ``token_bytes`` has the number of bytes of text of each token, if it is known. ``reading`` is the order of
    the samples of ``train``. ``fraction`` is the share of all samples that was split off as ``val``, if any.
    """

    train: Source
    val: Source
    entropy: float | None = None
    encode: Callable[[str], list[int]] | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    token_bytes: Sequence[int] | None = None
    reading: Reading = "shuffled"
    fraction: float | None = None

    def order(self, seed: int) -> Callable[[int, int, int], Indices]:
        """Returns a function of the optimizer step (from 0), the batch size and the number of samples.

        That function returns the indices of the step's samples.
        """
        if self.reading == "in order":
            return in_order
        if self.reading == "in epochs":
            return partial(in_epochs, seed, len(self.train))
        return partial(batch_indices, seed)


def entropy(source: Source) -> float | None:
    """Returns the entropy of the frequencies of all target values, in nats per target.

    It returns ``None`` for an empty source. This entropy is the loss on ``source`` of the best model that
    ignores its input (for text, the best unigram model): it predicts exactly these frequencies. A model with
    a lower loss has learned from context.
    """
    counts = np.zeros(0, np.int64)
    for start in range(0, len(source), CHUNK):
        targets = source.targets(np.arange(start, min(start + CHUNK, len(source)))).numpy().ravel()
        more = np.bincount(targets, minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    share = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(share * np.log(share)).sum()) if len(share) else None


VAL_SHARE = 10  # training samples per validation sample


class Noise(Source):
    """Sample ``i`` has ``seq_len`` random tokens of (seed, ``first + i``); targets are one token later."""

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
