"""Constructors that cannot be recorded, and those whose numbers are not determined: a class for each."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import nn

from tests.parallel.constructors import SIZE, Made, One


class WritesThroughNumpy(One):
    def fill(self) -> None:
        self.weight.data.numpy()[:] = np.arange(24 * 16, dtype=np.float32).reshape(SIZE)


class ChangesItsArray(Made):
    """The parameter and the array share memory."""

    def __init__(self) -> None:
        super().__init__()
        table = np.zeros(SIZE, dtype=np.float32)
        self.weight = nn.Parameter(torch.from_numpy(table))
        table[:] = 5


class CopiesThenChangesItsArray(One):
    def fill(self) -> None:
        table = np.ones(SIZE, dtype=np.float32)
        self.weight.data.copy_(torch.from_numpy(table))
        table += 1


class AsksForItsMemory(One):
    def fill(self) -> None:
        nn.init.normal_(self.weight)
        assert self.weight.data_ptr() != 0


class HidesWhatFailed(One):
    """A failed recording must not be mistaken for a constructor that failed."""

    def fill(self) -> None:
        nn.init.normal_(self.weight)
        try:
            self.weight.data_ptr()
        except ValueError:
            nn.init.zeros_(self.weight)


class Threads(One):
    def fill(self) -> None:
        thread = threading.Thread(target=nn.init.ones_, args=(self.weight,))
        thread.start()
        thread.join()


WHOLE = {
    Threads: "starts a thread, which cannot be followed",
    WritesThroughNumpy: "cannot be recorded: ValueError: assignment destination is read-only",
    ChangesItsArray: "changes an array after a tensor was made of it",
    CopiesThenChangesItsArray: "changes an array after a tensor was made of it",
    AsksForItsMemory: "calls Tensor.data_ptr, which needs its memory",
    HidesWhatFailed: "calls Tensor.data_ptr, which needs its memory",
}


class Sparse(Made):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("links", torch.eye(4).to_sparse())


class SparseAttribute(Made):
    def __init__(self) -> None:
        super().__init__()
        self.links = torch.eye(4).to_sparse()


class Unwritten(Made):
    """A weight, a buffer and an attribute that are never written, and a weight with an unwritten row."""

    def __init__(self) -> None:
        super().__init__()
        self.good, self.bad = nn.Parameter(torch.zeros(SIZE)), nn.Parameter(torch.empty(SIZE))
        self.rows = nn.Parameter(torch.empty(SIZE))
        with torch.no_grad():
            self.rows[1:] = 2
        self.register_buffer("cache", torch.empty(3, 4), persistent=False)
        self.attribute = torch.empty(3) * 2
        self.derived = nn.Parameter(torch.stack([self.bad.detach(), self.good.detach()]).sum(0))


class UnwrittenWhole(Unwritten):
    """The same tensors in a constructor that cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.good.data_ptr()


class OnMeta(Made):
    """A module that is on the meta device in a plain build too."""

    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Parameter(torch.zeros(SIZE))
        self.inner = nn.Linear(16, 24, bias=False, device="meta")


class Unseeded(Made):
    """Numbers that differ at each run."""

    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Parameter(torch.zeros(SIZE))
        self.w = nn.Parameter(torch.tensor(np.random.default_rng().standard_normal(3)))
        self.g = nn.Parameter(torch.empty(SIZE))
        generator = torch.Generator()
        generator.seed()
        nn.init.normal_(self.g, generator=generator)


class UnseededWhole(Unseeded):
    def __init__(self) -> None:
        super().__init__()
        self.good.data_ptr()
