"""Small networks, none of them the launcher's own, whose operators are split in all ways."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mlp(nn.Module):
    """The network of MindSpore's first document: Flatten, three products, two ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.fc1 = nn.Linear(16, 24)
        self.relu1 = nn.ReLU()
        self.fc2 = nn.Linear(24, 24, bias=False)
        self.relu2 = nn.ReLU(inplace=True)
        self.fc3 = nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.fc1(self.flatten(x)))
        return self.fc3(self.relu2(self.fc2(x)))


class MatMul(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) / rows**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Document(nn.Module):
    """The same network as MindSpore writes it: MatMul takes a matrix (inputs, outputs)."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.matmul1 = MatMul(16, 32)
        self.relu1 = nn.ReLU()
        self.matmul2 = MatMul(32, 32)
        self.relu2 = nn.ReLU()
        self.matmul3 = MatMul(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.matmul1(self.flatten(x)))
        return self.matmul3(self.relu2(self.matmul2(x)))


class Convolutions(nn.Module):
    """A network with BatchNorm, pooling and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, 8)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm1(self.conv1(x)))
        x = self.pool(x + self.norm2(self.conv2(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim, bias=False)  # the gradient of its bias would be zero, up to rounding
        self.o = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.heads, d // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2 = nn.RMSNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A network whose embedding and head are one tensor."""

    def __init__(self, layers: int = 2, dim: int = 16, heads: int = 4, vocab: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.place = nn.Parameter(torch.randn(8, dim))
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x) + self.place
        for layer in self.layers:
            y = layer(y)
        return self.head(self.norm(y))


class TwoBranches(nn.Module):
    """Two branches that meet; one weight is used twice, with softmax and cat in between."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(12, 16), nn.Linear(12, 16)
        self.both = nn.Linear(32, 16)
        self.again = nn.Linear(16, 16)
        self.out = nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = torch.tanh(self.left(x)), torch.sigmoid(self.right(y))
        z = self.both(torch.cat([left, right], -1)) * left.softmax(-1)
        z = self.again(F.silu(self.again(z))) + right.mean(-1, keepdim=True)
        return self.out(z)
