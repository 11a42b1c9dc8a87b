"""The language model: a Llama-style decoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.job.schema.components import LanguageModel
from launcher.models.attention import attention
from launcher.models.documents import attended, positions
from launcher.models.init import STD, Embedding, Linear
from launcher.models.rope import angles, rotate


class Attention(nn.Module):
    """Causal attention with rotary positions.

    The number of heads is read from the projections' width, so a rank may have only a part of them.
    """

    def __init__(self, dim: int, heads: int, kv_heads: int, theta: float, std: float) -> None:
        super().__init__()
        self.head, self.group, self.theta = dim // heads, heads // kv_heads, theta
        self.q = Linear(dim, heads * self.head)
        self.k = Linear(dim, kv_heads * self.head)
        self.v = Linear(dim, kv_heads * self.head)
        self.o = Linear(heads * self.head, dim, std)

    def forward(self, x: Tensor, places: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        """``places`` (batch, time) and ``seen`` are the positions and the mask of packed documents."""
        q, k, v = self._projected(x)
        time = q.shape[2]  # not x's: a rank may have only a part of x's time
        cos, sin = angles(time, self.head, self.theta, x)
        if places is not None:
            cos, sin = (F.embedding(places, t).unsqueeze(1) for t in (cos, sin))
        return self._attended(rotate(q, cos, sin), rotate(k, cos, sin), v, seen)

    def piece(
        self, x: Tensor, start: int = 0, past: Sequence[tuple[Tensor, ...]] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output and the keys and values of a piece of the sequence that begins at ``start``.

        ``past`` has the keys and values of the earlier pieces.
        """
        q, k, v = self._projected(x)
        time = q.shape[2]
        cos, sin = angles(time, self.head, self.theta, x, start=start)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        kept = k, v

        # earlier pieces are visible as a whole, later positions of this piece are not
        seen = None
        if past:
            k, v = (torch.cat(ts, 2) for ts in zip(*past, kept, strict=True))
            seen = torch.ones(time, k.shape[2], dtype=torch.bool, device=q.device).tril(start)
        return self._attended(q, k, v, seen), kept

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._heads(proj(x)) for proj in (self.q, self.k, self.v))

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        """``seen`` is ``None`` for causal attention."""
        out = attention(q, k, v, self.group, seen)
        y: Tensor = self.o(out.transpose(1, 2).flatten(2))
        return y

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, time, heads x head) -> (batch, heads, time, head)"""
        return x.view(*x.shape[:2], -1, self.head).transpose(1, 2)


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int, std: float) -> None:
        super().__init__()
        self.gate = Linear(dim, hidden)
        self.up = Linear(dim, hidden)
        self.down = Linear(hidden, dim, std)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    def __init__(self, s: LanguageModel) -> None:
        assert s.kv_heads is not None
        assert s.ffn_dim is not None
        super().__init__()
        std = STD / (2 * s.layers) ** 0.5  # 2 * layers branches add up in the residual
        self.attn_norm = nn.RMSNorm(s.dim, eps=s.norm_eps)
        self.attn = Attention(s.dim, s.heads, s.kv_heads, theta=s.rope_theta, std=std)
        self.mlp_norm = nn.RMSNorm(s.dim, eps=s.norm_eps)
        self.mlp = SwiGLU(s.dim, s.ffn_dim, std)

    def forward(self, x: Tensor, *packed: Tensor) -> Tensor:
        """``packed`` has the positions and the mask of packed documents, as ``Attention`` takes them."""
        h: Tensor = x + self.attn(self.attn_norm(x), *packed)
        h = h + self.mlp(self.mlp_norm(h))
        return h


class Decoder(nn.Module):
    """Tokens (batch, time) -> logits (batch, time, vocabulary). ``settings`` has its defaults resolved.

    ``documents`` (batch, time) has the number of each token's document: each document gets the logits that it
    would get alone.
    """

    def __init__(self, settings: LanguageModel) -> None:
        super().__init__()
        assert settings.vocab_size is not None
        self.embed = Embedding(settings.vocab_size, settings.dim)
        self.layers = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.dim, eps=settings.norm_eps)
        self.head = Linear(settings.dim, settings.vocab_size)
        if settings.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        packed: tuple[Tensor, ...] = ()
        if documents is not None:
            seen = attended(documents)  # for all layers
            packed = positions(seen), seen.unsqueeze(1)
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h, *packed)
        logits: Tensor = self.head(self.norm(h))
        return logits
