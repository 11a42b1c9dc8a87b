"""Mixes samples of several sources by weight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from launcher.data.shuffle import Indices
from launcher.data.source import Source
from launcher.data.token_files.mixture import Mixture


class MixedSource(Source):
    """Draws from sources by weight; a source that is exhausted starts again.

    One epoch is long enough to read every source once.
    """

    def __init__(self, sources: Sequence[Source], mixture: Mixture) -> None:
        self.sources, self.mixture = tuple(sources), mixture
        self._len = mixture.epoch([len(source) for source in sources])

    def __len__(self) -> int:
        return self._len

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        parts = [(rows, self.sources[s].inputs(own)) for s, rows, own in self._each(indices)]
        count = len(parts[0][1])
        return tuple(_merged(len(indices), [(rows, each[i]) for rows, each in parts]) for i in range(count))

    def targets(self, indices: Indices) -> Tensor:
        parts = self._each(indices)
        return _merged(len(indices), [(rows, self.sources[s].targets(own)) for s, rows, own in parts])

    def _each(self, indices: Indices) -> list[tuple[int, Indices, Indices]]:
        """For each source with samples among ``indices``: its number, their rows, their indices in it."""
        chosen, before = self.mixture.at(indices)
        rows = [(int(s), np.flatnonzero(chosen == s)) for s in np.unique(chosen)]
        return [(s, mine, before[mine] % len(self.sources[s])) for s, mine in rows]


def _merged(count: int, parts: Sequence[tuple[Indices, Tensor]]) -> Tensor:
    out = parts[0][1].new_empty((count, *parts[0][1].shape[1:]))
    for rows, samples in parts:
        out[torch.from_numpy(rows)] = samples
    return out
