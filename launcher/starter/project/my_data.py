"""The data: any ``Dataset`` of torch. A tenth of it is held out."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Counting(Dataset[tuple[Tensor, Tensor]]):
    """Rows that count by a stride, 3 10 17 24 ..., and as targets the same rows, one further."""

    def __init__(self, words: int, length: int) -> None:
        self.words, self.length = words, length

    def __len__(self) -> int:
        return 15 * self.words

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        start, stride = i % self.words, 1 + i // self.words
        row = (start + stride * torch.arange(self.length + 1)) % self.words
        return row[:-1], row[1:]
