"""Models whose first loss shows whether their constructor's own initialization ran."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Skips(nn.Module):
    """The tied embedding is small only if the initialization ran: with ``nn.Embedding`` alone the loss is 30."""

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
    """Has a scale that is never initialized."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__(vocab, dim)
        self.scale = nn.Parameter(torch.empty(dim))
