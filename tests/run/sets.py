"""A model that depends on the order of a set of strings, which differs between processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NAMES = "one two three four five six seven eight nine ten"


class Unsorted(nn.Module):
    """Its constructor initializes layers in the order of a set."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        made = {name: nn.Linear(dim, dim) for name in set(NAMES.split())}
        self.embed, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab)
        self.layers = nn.ModuleDict({name: made[name] for name in sorted(made)})

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for layer in self.layers.values():
            h = h + torch.tanh(layer(h))
        out: Tensor = self.head(h)
        return out
