"""A GPT as arXiv 2205.05198 describes it, with what its layers keep for their backward.

There is no dropout after the embedding: the paper's figures are of the layers alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Dropout(nn.Module):
    """As large as one: a mask of one byte an element is kept. Random numbers are refused over tp."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(x < 0, 0.0) * (1 / (1 - self.p))


class Scaled(nn.Module):
    """What it returns lies in no part of what it is given, which may go."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


class Core(nn.Module):
    """Softmax attention with dropout, of (batch, heads, length, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = Dropout()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(2, 3)) * (1 / q.shape[3] ** 0.5)
        return self.dropout(F.softmax(scores.masked_fill(later, -10000.0), dim=-1)) @ v


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.width = dim // heads
        self.qkv, self.core, self.out = nn.Linear(dim, 3 * dim), Core(), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3 * self.width)).transpose(1, 2)
        return self.out(self.core(*heads.chunk(3, -1)).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.drop1 = nn.LayerNorm(dim), Attention(dim, heads), Dropout()
        self.norm2, self.up, self.act = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU()
        self.down, self.drop2 = nn.Linear(4 * dim, dim), Dropout()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop1(self.attn(self.norm1(x)))
        return x + self.drop2(self.down(self.act(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, vocab: int, dim: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, dim), nn.Parameter(torch.zeros(length, dim))
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.scaled = Scaled()
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.scaled(self.embed(tokens) + self.position)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
