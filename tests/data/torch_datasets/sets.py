"""Torch data sets as users write them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

CLASSES, SIDE = 3, 6


class Net(nn.Module):
    """Four linear layers, on the sum of ``ways`` inputs."""

    def __init__(self, ways: int = 1) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIDE, 8), nn.Linear(8, 8)
        self.third, self.last = nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.ways = ways

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        for m in more:
            x = x + m
        return self.last(torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))))


def numbers(i: int) -> Tensor:
    return torch.sin(torch.arange(1, SIDE + 1, dtype=torch.float64) * (i + 1))


class Rows(Dataset[Any]):
    """``noise``: each item draws from three global generators; ``how``: the form of an item, or what is wrong."""

    def __init__(self, samples: int, how: str = "pair", noise: bool = False, split: str = "train") -> None:
        self.samples, self.how, self.noise = (samples if split == "train" else 7), how, noise
        self.shift = 0 if split == "train" else 100
        self.own = np.random.default_rng(0)
        self.made = np.random.default_rng().random() if how == "made otherwise" else 0.0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> Any:
        x, y = numbers(i + self.shift) + self.made, i % CLASSES
        if self.noise:
            x = x + torch.randn(SIDE, dtype=torch.float64) + random.random() + np.random.random()
        if self.how == "own generator" or (self.how == "seldom own generator" and i % 5 == 4):
            x = x + self.own.random()
        if self.how == "raises at 5" and i == 5:
            raise OSError("no such picture")
        if self.how == "longer at 5" and i == 5:
            x = torch.cat([x, x])
        if self.how == "ids in a column":
            x = torch.cat([torch.tensor([1000.0 + i], dtype=x.dtype), x[1:]])
        shapes: dict[str, Any] = {
            "dict": {"image": x, "label": y},
            "tokens": {"input_ids": x, "labels": y},
            "two inputs": (x, -2 * x, y),
            "alone": x,
            "text": (str(i), y),
        }
        return shapes.get(self.how, (x, y))


class InEpochs(Rows):
    """Items whose size depends on the epoch, which a loop sets."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return x * (1 + self.epoch), y


class LateReads(Rows):
    """Other items after 100 reads."""

    reads = 0

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        x, y = super().__getitem__(i)
        return x * (2 if self.reads > 100 else 1), y


class OneBuffer(Rows):
    """Writes all items into one array, and returns it."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.buffer = np.zeros(SIDE)

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        self.buffer[:] = x.numpy()
        return self.buffer, y


class InBatches(Rows):
    """Reads several items at once; ``same`` as one by one, or shifted."""

    def __init__(self, samples: int, same: bool) -> None:
        super().__init__(samples)
        self.same = same

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] if self.same else (self[i][0] + 1, self[i][1]) for i in indices]


class NoSplit(Rows):
    """A data set whose constructor has no argument for the split."""

    def __init__(self, samples: int, noise: bool = False) -> None:
        super().__init__(samples, noise=noise)


class Trained(Rows):
    """A data set with the argument ``train``, as torchvision has it."""

    def __init__(self, samples: int, train: bool) -> None:
        super().__init__(samples, split="train" if train else "val")


class Endless(Dataset[Any]):
    def __getitem__(self, i: int) -> Any:
        return numbers(i), i % CLASSES


class Row(IterableDataset[Any]):
    """The same items in order, up to ``samples`` of them; a second iterator continues where the first ended."""

    def __init__(self, samples: int = 1 << 40, noise: bool = False, how: str = "pair") -> None:
        self.rows = Rows(samples, how, noise)
        self.numbers = iter(range(samples))
        self.offset = random.random() if noise else np.random.default_rng().random() if how == "made otherwise" else 0.0

    def __iter__(self) -> Iterator[Any]:
        for i in self.numbers:
            x, y = self.rows[i]
            yield x + self.offset, y


class Kept(IterableDataset[Any]):
    """A stream that reports its position; ``how``: in which form, or what is missing. ``read`` counts all items."""

    read = 0

    def __init__(self, how: str = "") -> None:
        self.how, self.at, self.carry = how, 0, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            type(self).read += 1
            self.at, self.carry = self.at + 1, self.carry + self.at
            noise = torch.randn(SIDE, dtype=torch.float64)
            yield numbers(self.at - 1) + self.carry + noise, (self.at - 1) % CLASSES

    def state_dict(self) -> Any:
        carry: Any = {"lost": 0, "no JSON": torch.tensor(self.carry), "long": "x" * (1 << 20)}.get(self.how, self.carry)
        return {"at": self.at, "carry": carry}

    def load_state_dict(self, state: Any) -> None:
        self.at, self.carry = state["at"], state["carry"]


class KeptByIterator(IterableDataset[Any]):
    """A stream whose iterator reports the position, which torchdata also allows."""

    def __iter__(self) -> Any:
        return Places()


class Places:
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Places:
        return self

    def __next__(self) -> Any:
        Kept.read += 1
        self.at += 1
        return numbers(self.at - 1), (self.at - 1) % CLASSES

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


class ByRank(Row):
    """A stream that splits itself over ranks if there is a process group, as some do."""

    def __iter__(self) -> Iterator[Any]:
        there = dist.is_initialized()
        for i, item in enumerate(super().__iter__()):
            if not there or i % dist.get_world_size() == dist.get_rank():
                yield item


class ByProcess(Row):
    """A stream whose items differ between processes."""

    def __iter__(self) -> Iterator[Any]:
        for x, y in super().__iter__():
            yield x + os.getpid(), y


class LateByTime(Row):
    """A stream whose items depend on the clock, but not the first ones."""

    def __iter__(self) -> Iterator[Any]:
        for i, (x, y) in enumerate(super().__iter__()):
            yield x + (time.perf_counter() if i >= 20 else 0), y


class LateState(Kept):
    """A stream that restores what its first items need, but not that of later ones."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.carry = self.carry if self.at < 10 else 0


class InEpoch(Row):
    """A stream that needs to be told the epoch, as one that shuffles its shards by it."""

    epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        assert self.epoch is not None
        for x, y in super().__iter__():
            yield x * (1 + self.epoch), y


class Counted(Row):
    """A stream that knows its length and has its own splits."""

    def __init__(self, samples: int, split: str) -> None:
        super().__init__(samples if split == "train" else 7)
        self.samples = samples if split == "train" else 7

    def __len__(self) -> int:
        return self.samples


class Loader(DataLoader[Any]):
    def __init__(self) -> None:
        super().__init__(Rows(8))


def rows(samples: int) -> NoSplit:
    """A function that returns a data set."""
    return NoSplit(samples)
