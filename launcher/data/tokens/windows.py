"""Samples that are windows of tokens, and mixtures of sources."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher.data.shuffle import Indices
from launcher.data.source import Dataset, Source
from launcher.data.tokens.corpus import FileWindows, Mixture, corpus, total
from launcher.data.tokens.formats import window
from launcher.data.tokens.packed_documents import PackedDocuments
from launcher.errors import RequestError
from launcher.job.schema.data import Tokens
from launcher.plan.values.class_dims import IGNORED


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


class MixedSource(Source):
    """Reads sources in the proportions of ``mixture``; a source that is exhausted starts again.

    One epoch is long enough to read all of every source.
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
        """Returns for each source in ``indices`` its index, the rows that it fills and its sample indices."""
        chosen, before = self.mixture.at(indices)
        rows = [(int(s), np.flatnonzero(chosen == s)) for s in np.unique(chosen)]
        return [(s, mine, before[mine] % len(self.sources[s])) for s, mine in rows]


def _merged(count: int, parts: Sequence[tuple[Indices, Tensor]]) -> Tensor:
    out = parts[0][1].new_empty((count, *parts[0][1].shape[1:]))
    for rows, samples in parts:
        out[torch.from_numpy(rows)] = samples
    return out


def document_numbers(ends: Tensor) -> Tensor:
    """Numbers the documents of each sample from 0. A token that ends a document belongs to it.

    >>> import torch
    >>> document_numbers(torch.tensor([[False, True, True, False]])).tolist()
    [[0, 0, 1, 2]]
    """
    return ends.cumsum(1) - ends.long()


def mask_last_tokens(targets: Tensor, ends: Tensor) -> Tensor:
    """Masks the targets of tokens that end a document: these targets are the first tokens of the next one."""
    return targets.masked_fill(ends, IGNORED)


class TokenWindows(Source):
    """The windows of several files, in order; a target is one token later.

    If ``apart``, a second input numbers the documents of a window, and a token has no target in another
    document. Each process opens a file when it first reads a sample of it.
    """

    def __init__(
        self, parts: Sequence[FileWindows], seq_len: int, vocab_size: int, *, apart: bool = False
    ) -> None:
        self.parts, self.seq_len, self.vocab_size = tuple(parts), seq_len, vocab_size
        self.apart = apart
        self._ends = np.array([*accumulate(part.count for part in parts)], np.int64)

    def __len__(self) -> int:
        return total(self.parts)

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        tokens = self._read(indices, 0)
        if not self.apart:
            return (tokens,)
        return tokens, document_numbers(self._ending(indices, tokens))

    def targets(self, indices: Indices) -> Tensor:
        targets = self._read(indices, 1)
        if not self.apart:
            return targets
        return mask_last_tokens(targets, self._ending(indices, self._read(indices, 0)))

    def _read(self, indices: Indices, shift: int) -> Tensor:
        out = np.empty((len(indices), self.seq_len), np.int64)
        which = self._part(indices)
        for row, index, k in zip(out, indices.tolist(), which.tolist(), strict=True):
            part = self.parts[k]
            start = (index - int(self._ends[k]) + part.count + part.first) * self.seq_len + shift
            row[:] = window(part.file, start, start + self.seq_len, self.vocab_size)
        return torch.from_numpy(out)

    def _ending(self, indices: Indices, tokens: Tensor) -> Tensor:
        """Marks the tokens that end a document. Each file has its own id for such a token."""
        ends = [self.parts[k].file.end_of_document for k in self._part(indices).tolist()]
        return tokens == torch.tensor(ends)[:, None]

    def _part(self, indices: Indices) -> Indices:
        """Returns the index of the part that contains each sample."""
        return np.searchsorted(self._ends, indices, side="right")


def open_tokens(settings: Tokens) -> Dataset:
    """Opens prepared tokens. Leaves out their entropy, which needs every token. Raises ``RequestError``."""
    made, problems = corpus(settings)
    if made is None:
        raise RequestError(tuple(problems))

    def source(windows: Sequence[FileWindows]) -> Source:
        length, apart = settings.seq_len, settings.document_mask
        if settings.packing == "windows":
            return TokenWindows(windows, length, made.vocab_size, apart=apart)
        return PackedDocuments(windows, length, made.vocab_size, packing=settings.packing, apart=apart)

    parts = [source(windows) for windows in made.train]
    train = MixedSource(parts, made.mixture) if settings.sources else parts[0]
    return Dataset(train, source(made.val))
