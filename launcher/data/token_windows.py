"""Windows of files of tokens as samples, of one source or of several that are mixed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from launcher.data.shuffle import Indices
from launcher.data.source import Dataset, Source
from launcher.data.token_files.corpus import corpus
from launcher.data.token_files.file_windows import FileWindows, total
from launcher.data.token_files.mixture import Mixture
from launcher.data.token_files.read import window
from launcher.errors import RequestError
from launcher.job.schema.components import Tokens


class TokenWindows(Source):
    """Windows of many files, one file after the other; a target is one token later.

    Files are opened when a sample of them is read, by each process for itself.
    """

    def __init__(self, parts: Sequence[FileWindows], seq_len: int, vocab_size: int) -> None:
        self.parts, self.seq_len, self.vocab_size = tuple(parts), seq_len, vocab_size
        self._ends = np.array([*accumulate(part.count for part in parts)], np.int64)

    def __len__(self) -> int:
        return total(self.parts)

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        return (self._read(indices, 0),)

    def targets(self, indices: Indices) -> Tensor:
        return self._read(indices, 1)

    def _read(self, indices: Indices, shift: int) -> Tensor:
        out = np.empty((len(indices), self.seq_len), np.int64)
        which = np.searchsorted(self._ends, indices, side="right")
        for row, index, k in zip(out, indices.tolist(), which.tolist(), strict=True):
            part = self.parts[k]
            start = (index - int(self._ends[k]) + part.count + part.first) * self.seq_len + shift
            row[:] = window(part.file, start, start + self.seq_len, self.vocab_size)
        return torch.from_numpy(out)


class MixedSource(Source):
    """Samples of several sources by weight; a source that is read to its end is read again from its start.

    One epoch is as long as it takes to read every source once.
    """

    def __init__(self, sources: Sequence[Source], mixture: Mixture) -> None:
        self.sources, self.mixture = tuple(sources), mixture
        self._len = mixture.epoch([len(source) for source in sources])

    def __len__(self) -> int:
        return self._len

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        parts = self._each(indices)
        return (_merged(len(indices), [(rows, self.sources[s].inputs(own)[0]) for s, rows, own in parts]),)

    def targets(self, indices: Indices) -> Tensor:
        parts = self._each(indices)
        return _merged(len(indices), [(rows, self.sources[s].targets(own)) for s, rows, own in parts])

    def _each(self, indices: Indices) -> list[tuple[int, Indices, Indices]]:
        """Each source that has samples among them, which rows these are, and their indices in the source."""
        chosen, before = self.mixture.at(indices)
        rows = [(int(s), np.flatnonzero(chosen == s)) for s in np.unique(chosen)]
        return [(s, mine, before[mine] % len(self.sources[s])) for s, mine in rows]


def _merged(count: int, parts: Sequence[tuple[Indices, Tensor]]) -> Tensor:
    out = parts[0][1].new_empty((count, *parts[0][1].shape[1:]))
    for rows, samples in parts:
        out[torch.from_numpy(rows)] = samples
    return out


def open_tokens(settings: Tokens) -> Dataset:
    """Raises ``RequestError``. The entropy is not known: it would take reading all of it."""
    made, found = corpus(settings)
    if made is None:
        raise RequestError(tuple(found))
    parts = [TokenWindows(parts, settings.seq_len, made.vocab_size) for parts in made.train]
    train = MixedSource(parts, made.mixture) if settings.sources else parts[0]
    return Dataset(train, TokenWindows(made.val, settings.seq_len, made.vocab_size))
