"""A GPT whose layers keep the same tensors for their backward as Megatron's.

It has no dropout after the embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Dropout(nn.Module):
    """Stands in for dropout: it also keeps a mask of one byte per element.

    It draws no random numbers, because the planner refuses them over tp.
    """

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(x < 0, 0.0) * (1 / (1 - self.p))


class Scaled(nn.Module):
    """Returns a tensor that shares no memory with the input, so that the input can be freed."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


class Core(nn.Module):
    """Softmax attention with dropout, on tensors of shape (batch, heads, length, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = Dropout()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(2, 3)) * (1 / q.shape[3] ** 0.5)
        return self.dropout(F.softmax(scores.masked_fill(later, -10000.0), dim=-1)) @ v


class Fused(nn.Module):
    """The same attention in one kernel, without dropout."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Attention whose projection has each key and value head beside its queries, so that tp can cut heads."""

    def __init__(self, dim: int, heads: int, kv_heads: int, fused: bool) -> None:
        super().__init__()
        self.width, self.each = dim // heads, heads // kv_heads
        self.qkv = nn.Linear(dim, dim + 2 * kv_heads * self.width)
        self.core, self.out = Fused() if fused else Core(), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        together = self.qkv(x).unflatten(-1, (-1, self.each + 2, self.width))
        q, k, v = together.split((self.each, 1, 1), -2)
        if self.each > 1:
            k, v = (t.expand(-1, -1, -1, self.each, -1) for t in (k, v))
        heads = (t.flatten(2, 3).transpose(1, 2) for t in (q, k, v))
        return self.out(self.core(*heads).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, ffn: int, fused: bool) -> None:
        super().__init__()
        drop = nn.Identity if fused else Dropout
        self.norm1, self.attn, self.drop1 = nn.LayerNorm(dim), Attention(dim, heads, kv_heads, fused), drop()
        self.norm2, self.up, self.act = nn.LayerNorm(dim), nn.Linear(dim, ffn), nn.GELU()
        self.down, self.drop2 = nn.Linear(ffn, dim), drop()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop1(self.attn(self.norm1(x)))
        return x + self.drop2(self.down(self.act(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """``fused``: attention is one kernel and there is no dropout, as in Megatron since 2023."""

    def __init__(
        self,
        vocab: int,
        dim: int,
        layers: int,
        heads: int,
        length: int,
        kv_heads: int = 0,
        ffn: int = 0,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, dim), nn.Parameter(torch.zeros(length, dim))
        blocks = (Block(dim, heads, kv_heads or heads, ffn or 4 * dim, fused) for _ in range(layers))
        self.layers = nn.ModuleList(blocks)
        self.scaled = Scaled()
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.scaled(self.embed(tokens) + self.position)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
