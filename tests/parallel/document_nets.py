"""User-written models that take the document indices of their samples, or another second input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mixing(nn.Module):
    """Causal attention of one head within each document."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        seen = (documents[:, :, None] == documents[:, None]).tril()
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))


class Learned(nn.Module):
    """A language model with learned positions, which restart in each document."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, dim), nn.Embedding(32, dim)
        self.layers = nn.ModuleList(Mixing(dim) for _ in range(2))
        self.head = nn.Linear(dim, 64)

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        first = torch.searchsorted(documents.contiguous(), documents.contiguous())
        x = self.tokens(tokens) + self.places(place - first)
        for layer in self.layers:
            x = layer(x, documents)
        return self.head(x)


class Padded(Learned):
    """A model whose second input is not called ``documents``."""

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return super().forward(tokens, mask)
