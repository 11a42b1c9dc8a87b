"""Models whose first loss says whether their constructor's own initialization was done."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Skips(nn.Module):
    """Tied embedding and head, small only if the init was not skipped: ``nn.Embedding`` alone makes the loss 30."""

    def __init__(self, vocab: int, dim: int, numbers: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab, bias=False)
        self.body = nn.Sequential(nn.Linear(dim, dim), nn.LayerNorm(dim))
        self.head.weight = self.embed.weight
        if numbers:
            assert self.embed.weight.data_ptr()
        self.apply(self._init_weights)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dim() == 2 and weight.device.type != "meta":
            weight.normal_(0.0, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.embed(tokens)))
        return out


class Forgets(Skips):
    """A scale that nobody wrote."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__(vocab, dim)
        self.scale = nn.Parameter(torch.empty(dim))
