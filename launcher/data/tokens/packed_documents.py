"""Samples of packed documents; a target is a token of the same document."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from launcher.data.shuffle import Indices
from launcher.data.source import Source
from launcher.data.tokens.bin_packing import Packing, document_index
from launcher.data.tokens.corpus import FileWindows, total
from launcher.data.tokens.formats import window
from launcher.plan.values.class_dims import IGNORED


class PackedDocuments(Source):
    """The packed windows of several files, in order; a target is the next token of the same document.

    If ``apart``, a second input numbers the documents of a window, and gives its padding the next number.
    """

    def __init__(
        self, parts: Sequence[FileWindows], seq_len: int, vocab_size: int, *, packing: Packing, apart: bool
    ) -> None:
        self.parts, self.seq_len, self.vocab_size = tuple(parts), seq_len, vocab_size
        self.packing, self.apart = packing, apart
        self._ends = np.array([*accumulate(part.count for part in parts)], np.int64)

    def __len__(self) -> int:
        return total(self.parts)

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        tokens, documents, _ = self._read(indices)
        return (tokens, documents) if self.apart else (tokens,)

    def targets(self, indices: Indices) -> Tensor:
        return self._read(indices)[2]

    def _read(self, indices: Indices) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tokens, the numbers of their documents, and the targets."""
        tokens, documents, targets = np.empty((3, len(indices), self.seq_len), np.int64)
        which = np.searchsorted(self._ends, indices, side="right")
        for row, (index, k) in enumerate(zip(indices.tolist(), which.tolist(), strict=True)):
            part = self.parts[k]
            number = index - int(self._ends[k]) + part.count + part.first
            self._fill(part, number, tokens[row], documents[row], targets[row])
        return torch.from_numpy(tokens), torch.from_numpy(documents), torch.from_numpy(targets)

    def _fill(
        self, part: FileWindows, number: int, tokens: Indices, documents: Indices, targets: Indices
    ) -> None:
        """Fills ``tokens``, ``documents`` and ``targets`` with one window."""
        file, end = part.file, part.file.end_of_document
        assert end is not None, "corpus refuses a file without it"
        targets[:] = IGNORED
        at, pieces = 0, document_index(file, self.seq_len, self.packing).window(number)
        for document, (start, stop) in enumerate(pieces):
            until = at + stop - start
            read = window(file, start, min(stop + 1, file.tokens), self.vocab_size)
            tokens[at:until], documents[at:until] = read[: stop - start], document
            targets[at : at + len(read) - 1] = read[1:]
            targets[at:until][tokens[at:until] == end] = IGNORED
            at = until
        tokens[at:], documents[at:] = end, len(pieces)
