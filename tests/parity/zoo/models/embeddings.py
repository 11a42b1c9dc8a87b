"""Tables of tokens and of positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.zoo.case import D, tokens
from tests.parity.zoo.models.ties import LM, Lm


@tokens(*LM)
class MaxNorm(Lm):
    """An embedding that scales its rows to a maximal norm in the forward."""

    def extra(self) -> None:
        self.embed = nn.Embedding(8, D, max_norm=1.0)


@tokens(*LM)
class SparseEmbedding(Lm):
    """An embedding with sparse gradients."""

    def extra(self) -> None:
        self.embed = nn.Embedding(8, D, sparse=True)


@tokens(*LM)
class ByFrequency(Lm):
    """An embedding whose gradients are divided by the token's frequency in a micro batch."""

    def extra(self) -> None:
        self.embed = nn.Embedding(8, D, scale_grad_by_freq=True)


@tokens(*LM)
class Padded(Lm):
    """An embedding with a padding token."""

    def extra(self) -> None:
        self.embed = nn.Embedding(8, D, padding_idx=3)


@tokens("bag", "a", "b", "head", target=())
class Bag(Lm):
    """An EmbeddingBag."""

    def extra(self) -> None:
        del self.embed
        self.bag = nn.EmbeddingBag(8, D, mode="mean")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(self.bag(x[:, :3])).tanh()).tanh())


@tokens(*LM)
class RootPositions(Lm):
    """A table of positions is a parameter of the root."""

    def extra(self) -> None:
        self.places = nn.Parameter(torch.randn(6, D) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(self.embed(x) + self.places).tanh()).tanh() + self.places[: x.shape[1]])


@tokens("embed", "places", "a", "b", "head")
class PositionsByNumber(Lm):
    """Positions are looked up by an arange in the glue, with a causal mask made in the glue."""

    def extra(self) -> None:
        self.places = nn.Embedding(8, D)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        h = self.a(self.embed(x) + self.places(torch.arange(n)))
        mask = torch.full((n, n), float("-inf"), dtype=h.dtype).triu(1)
        h = self.b((h @ h.mT / D**0.5 + mask).softmax(-1) @ h)
        return self.head(h)


@tokens(*LM)
class Rotary(Lm):
    """Rotary angles as non-persistent buffers."""

    def extra(self) -> None:
        angle = torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.3, 0.1, 0.03]))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    def turn(self, h: Tensor) -> Tensor:
        p, q = h.chunk(2, -1)
        return torch.cat([p * self.cos - q * self.sin, p * self.sin + q * self.cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.turn(self.b(self.turn(self.a(self.embed(x))).tanh())))


@tokens("a", "b", "head")
class OneHot(Lm):
    """No embedding: one_hot in the glue."""

    def extra(self) -> None:
        del self.embed

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(F.one_hot(x, 8).double()).tanh()).tanh())


@tokens(*LM, ignored=True)
class IgnoredTargets(Lm):
    """A third of the targets are -100, and all of them in some samples."""


@tokens(*LM, ignored=True, optim="adamw")
class IgnoredTied(Lm):
    """A third of the targets are -100, with a tied head, under AdamW."""

    def extra(self) -> None:
        self.head.weight = self.embed.weight


@tokens(*LM)
class PaddedTied(Lm):
    """A padding token's row gets no gradient as an embedding, but gets one as a head."""

    def extra(self) -> None:
        self.embed = nn.Embedding(8, D, padding_idx=0)
        self.head.weight = self.embed.weight
