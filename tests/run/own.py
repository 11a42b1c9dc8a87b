"""Models in a user's own code."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import Tensor, nn

from launcher.run.status_record import RunStatus


def this_rank() -> str:
    """Return the rank without the planner's notice, because it refuses models that ask for their rank."""
    value: bytes = vars(os.environ)["_data"][b"RANK"]
    return value.decode()


class Guard(nn.Module):
    """Fails on ``rank`` in the first attempt; the message says whether Hydra is imported."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if x.device.type != "meta" and (this_rank(), attempt) == (str(self.rank), "0"):
            raise RuntimeError(f"rank {self.rank} has had enough; hydra is here: {'hydra' in sys.modules}")
        return x


class Fragile(nn.Module):
    """A model with a ``guard``, which is a module of its own so that its code is not traced."""

    def __init__(self, vocab: int, dim: int, rank: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.guard = Guard(rank)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.guard(torch.relu(self.embed(tokens))))
        return out


class Limit(nn.Module):
    """On ``rank``, a micro batch of ``samples`` samples hangs, is killed, or fails, as ``end`` says."""

    def __init__(self, rank: int, samples: int, end: str) -> None:
        super().__init__()
        self.rank, self.samples, self.end = rank, samples, end

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "meta" or this_rank() != str(self.rank) or len(x) != self.samples:
            return x
        if self.end == "hang":
            time.sleep(3600)
        if self.end == "kill":  # as the system does when memory runs out
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError(f"no room for {len(x)} samples")


class Limited(nn.Module):
    """A model with a ``limit``, which is a module of its own so that its code is not traced."""

    def __init__(self, vocab: int, dim: int, rank: int, samples: int, end: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.limit = Limit(rank, samples, end)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.limit(torch.relu(self.embed(tokens))))
        return out


class Hungry(nn.Module):
    """Runs out of memory on ``rank``: really on a CPU, and with torch's error for a device."""

    def __init__(self, rank: int, of: str) -> None:
        super().__init__()
        self.rank, self.of = rank, of

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "meta" or this_rank() != str(self.rank):
            return x
        if self.of == "cpu":
            torch.empty(1 << 60, dtype=torch.uint8)
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of ..."
        )


class Feeding(nn.Module):
    """A model with a ``hungry`` module, which is a module of its own so that its code is not traced."""

    def __init__(self, vocab: int, dim: int, rank: int, of: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Tanh()) for _ in range(2))
        self.hungry = Hungry(rank, of)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.hungry(x))
        return out


class Warned(Fragile):
    """torchrun sends SIGTERM to rank 0, because another rank failed, just while rank 0 records its own error."""

    def __init__(self, vocab: int, dim: int, rank: int) -> None:
        super().__init__(vocab, dim, rank)
        real = RunStatus.fail

        def fail(self: RunStatus, error: BaseException) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)  # so that any thread can take the signal
            real(self, error)

        if this_rank() == "0":
            RunStatus.fail = fail  # type: ignore[method-assign]


class Spare(nn.Module):
    """Half of the model is never used and gets no gradient; dropout draws from the rank's random stream."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.spare = nn.Linear(dim, dim)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.embed(tokens)))
        return out


class Dropped(nn.Module):
    """A model with dropout, which draws from the random stream of each rank."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.embed(tokens)))
        return out


class Addressed(nn.Module):
    """Its layers have names with an @."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab, bias=False)
        self.by = nn.ModuleDict({"a@b": nn.Linear(dim, dim), "@": nn.Linear(dim, dim)})
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.by["@"](self.by["a@b"](self.embed(tokens)))))
        return out


class Normalized(nn.Module):
    """A model with batch normalization, whose statistics are those of one micro batch."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(vocab, dim), nn.BatchNorm1d(dim), nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        out: Tensor = self.head(h)
        return out


class Bypassed(nn.Module):
    """Uses the weight of a linear module that it does not call."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(vocab, dim), nn.Linear(dim, dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.embed(x) @ self.inner.weight)
        return logits


class OwnAdapter(nn.Linear):
    """An adapter whose parameters have the same names as ours but do something else."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)
        self.lora_A, self.lora_B = nn.Parameter(torch.ones(2, dim)), nn.Parameter(torch.zeros(dim, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.tanh(x @ self.lora_A.T) @ self.lora_B.T


class OwnAdapters(nn.Module):
    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.embed, self.inner, self.out = nn.Embedding(vocab, dim), OwnAdapter(dim), nn.Linear(dim, vocab)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.inner(self.embed(x)))
        return logits


WARMTH = {"scale": 1.0}


class Warm(nn.Module):
    """Reads a variable of its file."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(tokens)) * WARMTH["scale"]
        return out
