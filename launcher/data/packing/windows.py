"""Windows of token files as samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from launcher.data.packing.documents import numbered, within
from launcher.data.shuffle import Indices
from launcher.data.source import Source
from launcher.data.token_files.file_windows import FileWindows, total
from launcher.data.token_files.read import window


class TokenWindows(Source):
    """The windows of several files, in order; a target is one token later.

    If ``apart``, a second input numbers the documents of a window, and no target belongs to another document
    than its token. Each process opens a file when it first reads a sample of it.
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
        return tokens, numbered(self._ending(indices, tokens))

    def targets(self, indices: Indices) -> Tensor:
        targets = self._read(indices, 1)
        if not self.apart:
            return targets
        return within(targets, self._ending(indices, self._read(indices, 0)))

    def _read(self, indices: Indices, shift: int) -> Tensor:
        out = np.empty((len(indices), self.seq_len), np.int64)
        which = self._part(indices)
        for row, index, k in zip(out, indices.tolist(), which.tolist(), strict=True):
            part = self.parts[k]
            start = (index - int(self._ends[k]) + part.count + part.first) * self.seq_len + shift
            row[:] = window(part.file, start, start + self.seq_len, self.vocab_size)
        return torch.from_numpy(out)

    def _ending(self, indices: Indices, tokens: Tensor) -> Tensor:
        """Marks the tokens that end a document, by each file's own end token."""
        ends = [self.parts[k].file.end_of_document for k in self._part(indices).tolist()]
        return tokens == torch.tensor(ends)[:, None]

    def _part(self, indices: Indices) -> Indices:
        """The index of the part that contains each sample."""
        return np.searchsorted(self._ends, indices, side="right")
