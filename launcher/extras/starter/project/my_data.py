"""The data: any torch ``Dataset``. A tenth of it is used for validation."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Counting(Dataset[tuple[Tensor, Tensor]]):
    """Rows that count with a stride, 3 10 17 24 ...; targets are the same rows, one step later."""

    def __init__(self, words: int, length: int) -> None:
        self.words, self.length = words, length

    def __len__(self) -> int:
        return 15 * self.words

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        start, stride = i % self.words, 1 + i // self.words
        row = (start + stride * torch.arange(self.length + 1)) % self.words
        return row[:-1], row[1:]
