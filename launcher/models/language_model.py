"""A Llama-style decoder.

Every module that owns parameters re-initializes those and no others, so that a rank can draw the values of
one module from that module's own seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.job.schema.models import LanguageModel
from launcher.models.hugging_face import attended, positions

TABLES = 32
"""Number of cached tables per process: one per sequence length, or one per piece of a cut sequence."""

_LIBRARY = torch.library.Library("launcher", "DEF")
_LIBRARY.define(
    "rotary_table(SymInt start, SymInt time, int head, float theta, *, "
    "ScalarType dtype, Device device) -> Tensor"
)


def angles(time: int, head: int, theta: float, like: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine of every (position, pair of ``head`` dims) from position ``start`` on.

    They are computed in float64: an angle of thousands has few digits left in float32, which changes logits
    by 1e-4. They are returned in float64 for float64 inputs, else in float32. Do not change them in place:
    all layers read the same table.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        table = torch.ops.launcher.rotary_table(start, time, head, theta, dtype=dtype, device=like.device)
        cos, sin = table.unbind()
        return cos, sin
    if _watched(like):
        return _compute_table(start, time, head, theta, dtype=dtype, device=like.device)
    return _table(start, time, head, theta, dtype=dtype, device=like.device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates ``x`` (..., time, head): dim ``i`` pairs with ``i + head / 2``, as in Hugging Face's Llama."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def _compute_table(
    start: int, time: int, head: int, theta: float, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    place = torch.arange(start, start + time, device=device, dtype=torch.float64)
    pair = torch.arange(0, head, 2, device=device, dtype=torch.float64)
    angle = torch.outer(place, torch.pow(theta, -pair / head))
    return angle.cos().to(dtype), angle.sin().to(dtype)


@lru_cache(TABLES)
def _table(
    start: int, time: int, head: int, theta: float, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Computes the table once; a backward may save it, even if it was first read without gradients."""
    with torch.inference_mode(False), torch.no_grad():
        return _compute_table(start, time, head, theta, dtype=dtype, device=device)


def _watched(like: Tensor) -> bool:
    """Returns true if ``like`` is traced or on meta: a table that is made then must not enter the cache."""
    return (
        type(like) is not Tensor
        or like.is_meta
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


@torch.library.impl(_LIBRARY, "rotary_table", "CompositeExplicitAutograd")
def _of_graph(
    start: int, time: int, head: int, theta: float, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Computes the table as one operation of a graph: otherwise the compiler inlines it in each reader.

    It returns a copy, because the compiler may reuse the memory of tensors that a graph no longer needs.
    """
    made = _compute_table if device.type == "meta" else _table
    return torch.stack(made(start, time, head, theta, dtype=dtype, device=device))


def _shape(
    start: int, time: int, head: int, theta: float, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty((2, time, head // 2), dtype=dtype, device=device)


torch.library.register_fake("launcher::rotary_table", _shape, lib=_LIBRARY)


STD = 0.02


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=STD)


class Linear(nn.Linear):
    """A linear layer without bias; ``std`` is the standard deviation of its initial weight."""

    def __init__(self, inputs: int, outputs: int, std: float = STD) -> None:
        self.std = std  # before the base class, whose constructor calls reset_parameters
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Conv(nn.Conv2d):
    """A square convolution without bias, padded to keep the size at stride 1.

    It is initialized as in He et al. 2015, by the number of outputs (fan-out).
    """

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, size, stride, padding=size // 2, bias=False)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


WIDEST = 128
"""The largest head dim for which flash and cuDNN attention have a backward on all devices they support."""


class _Planned:
    """State of ``grouped_heads``.

    ``grouped`` is a class attribute, not a context variable, because torch puts context variables in no
    graph.
    """

    grouped = False


@contextmanager
def grouped_heads(supported: bool) -> Iterator[None]:
    """Sets whether the device that meta tensors stand for has kernels for grouped-query attention."""
    before, _Planned.grouped = _Planned.grouped, supported
    try:
        yield
    finally:
        _Planned.grouped = before


def attention(q: Tensor, k: Tensor, v: Tensor, group: int, seen: Tensor | None) -> Tensor:
    """Returns the attention of tensors (batch, heads, time, head).

    Each head of ``k`` and ``v`` serves ``group`` heads of ``q``. ``seen`` masks the keys that each query
    sees; ``None`` is causal attention.
    """
    grouped = group > 1 and _reads_groups(q, seen)
    if group > 1 and not grouped:
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=grouped)


def _reads_groups(q: Tensor, seen: Tensor | None) -> bool:
    """Returns true if torch selects a kernel that supports grouped-query attention, and it is worth using.

    CUDA's flash and cuDNN kernels support it, in bfloat16 (which devices too old for these kernels lack) and
    without a mask. CUDA's kernel for masks and float32 does not: torch would decompose attention. The CPU
    kernel does, but it sums gradients in another order and saves no time.
    """
    if seen is not None or q.dtype != torch.bfloat16 or q.shape[-1] > WIDEST:
        return False
    if q.is_meta:
        return _Planned.grouped
    return q.is_cuda


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
        """Attends; ``places`` (batch, time) and ``seen`` are positions and mask of packed documents."""
        q, k, v = self._projected(x)
        time = q.shape[2]  # not x's: a rank may have only a part of x's time
        cos, sin = angles(time, self.head, self.theta, x)
        if places is not None:
            cos, sin = (F.embedding(places, t).unsqueeze(1) for t in (cos, sin))
        return self._attended(rotate(q, cos, sin), rotate(k, cos, sin), v, seen)

    def piece(
        self, x: Tensor, start: int = 0, past: Sequence[tuple[Tensor, ...]] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the output and the keys and values of a piece of the sequence that begins at ``start``.

        ``past`` has the keys and values of the earlier pieces.
        """
        q, k, v = self._projected(x)
        time = q.shape[2]
        cos, sin = angles(time, self.head, self.theta, x, start=start)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        kept = k, v

        # earlier pieces are fully visible, later positions of this piece are not
        seen = None
        if past:
            k, v = (torch.cat(ts, 2) for ts in zip(*past, kept, strict=True))
            seen = torch.ones(time, k.shape[2], dtype=torch.bool, device=q.device).tril(start)
        return self._attended(q, k, v, seen), kept

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._heads(proj(x)) for proj in (self.q, self.k, self.v))

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        """Attends; ``seen`` is ``None`` for causal attention."""
        out = attention(q, k, v, self.group, seen)
        y: Tensor = self.o(out.transpose(1, 2).flatten(2))
        return y

    def _heads(self, x: Tensor) -> Tensor:
        """Reshapes (batch, time, heads x head) to (batch, heads, time, head)."""
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
        """Runs the block; ``packed`` has the positions and the mask of documents, as in ``Attention``."""
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
