"""The model: any ``nn.Module`` that returns logits. It needs no code for ranks or stages."""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(dim)
        self.norm_mlp = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y: Tensor = self.down(gelu(self.up(self.norm_mlp(x))))
        return x + y


class Model(nn.Module):
    def __init__(self, words: int, length: int, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.place = nn.Parameter(0.02 * torch.randn(length, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.head = nn.Linear(dim, words, bias=False)
        self.head.weight = self.embed.weight  # both use one table, even on different stages
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits
