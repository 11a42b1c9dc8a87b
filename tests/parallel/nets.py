"""Modules as users write them, each with one feature that makes it hard to split."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.ReLU())


class UNet(nn.Module):
    """Long skips: the very last module uses the output of ``down1``."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.mid = conv(2, 4), conv(4, 6, 2), conv(6, 6, 2)
        self.up2 = nn.ConvTranspose2d(6, 6, 2, 2)
        self.merge2 = conv(12, 6)
        self.up1 = nn.ConvTranspose2d(6, 4, 2, 2)
        self.merge1 = conv(8, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(a)
        y = self.up2(self.mid(b))
        y = self.merge2(torch.cat((y, b), 1))
        y = self.merge1(torch.cat([self.up1(y), a], dim=1))
        return self.head(y.mean((2, 3)))


class Residual(nn.Module):
    """Skip connections in the glue, added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = F.gelu(self.second(a)) + a
        c = self.third(b)
        c += a
        return self.head(c * b)


class Dictionary(nn.Module):
    """Layers in a ModuleDict, run in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"in": nn.Linear(6, 8), "hidden": nn.Linear(8, 8), "out": nn.Linear(8, 3)})

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.net.items():
            x = layer(x)
            if name != "out":
                x = x.tanh()
        return x


class Looped(nn.Module):
    """A forward that loops over its layers and indexes a list of norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x + torch.relu(layer(self.norms[i](x))) / math.sqrt(len(self.layers))
        return self.head(x)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ln, self.qkv, self.proj = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln(x)).split(x.size(-1), dim=2)
        return x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class NanoGPT(nn.Module):
    """Karpathy's forward, verbatim: positions made in the glue, an assert, tied weights, optional targets."""

    def __init__(self) -> None:
        super().__init__()
        self.block_size = 16
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(8, 6), "wpe": nn.Embedding(16, 6), "drop": nn.Dropout(0.0),
            "h": nn.ModuleList([Block(6) for _ in range(3)]), "ln_f": nn.LayerNorm(6),
        })  # fmt: skip
        self.lm_head = nn.Linear(6, 8, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.2)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.2)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        device = idx.device
        b, t = idx.size()  # noqa: RUF059
        assert t <= self.block_size, f"Cannot forward sequence of length {t}, block size is only {self.block_size}"
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        tok_emb = self.transformer.wte(idx)
        pos_emb = self.transformer.wpe(pos)
        x = self.transformer.drop(tok_emb + pos_emb)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            return F.cross_entropy(self.lm_head(x).view(-1, 8), targets.view(-1))
        return self.lm_head(x)


class Picky(nn.Module):
    """Python that reads the data and counts how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(6, 6), nn.Linear(6, 6)
        self.ran = 0

    def forward(self, x: Tensor) -> Tensor:
        self.ran += 1
        assert math.isfinite(x.abs().max().item())
        return self.large(x) + self.small(x)


class Eager(nn.Module):
    """Its named modules are Python that no tracer can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = Picky(), Picky(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)))


class Vision(nn.Module):
    """Root-level parameters in the glue: a class token and positions, added again before the last module."""

    def __init__(self) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, 6))
        self.pos = nn.Parameter(torch.randn(1, 5, 6) * 0.02)
        self.embed, self.mix, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = torch.cat((self.cls.expand(h.shape[0], -1, -1), h), 1) + self.pos
        h = torch.tanh(self.mix(h)) + self.pos
        return self.head(h[:, 0])


class Buffered(nn.Module):
    """Buffers in the glue, one of them not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(6, 6)).bool())
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6), persistent=False)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * self.scale
        h = h @ self.mask.to(h.dtype)
        return self.b(h * self.scale)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x).tanh()


class Joined(nn.Module):
    """Takes a tuple; ``used``: how many of its two parts it uses."""

    def __init__(self, used: int) -> None:
        super().__init__()
        self.used, self.lin = used, nn.Linear(6 + 4 * (used - 1), 3)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.lin(torch.cat(list(pair)[: self.used], -1))


class TuplePart(nn.Module):
    """A module returns two tensors: one crosses a stage boundary, the other stays."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.back, self.head = Pair(), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.pair(x)
        return self.head(left + self.back(right))


class TupleWhole(nn.Module):
    """The tuple itself crosses two stage boundaries."""

    used = 2

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.mid, self.join, self.head = Pair(), nn.Linear(6, 6), Joined(self.used), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        both = self.pair(x)
        return self.head(self.join(both) + self.mid(both[0]).sum(-1, keepdim=True))


class TupleHalf(TupleWhole):
    """The tuple crosses, but one part is never used and has no gradient."""

    used = 1


class Sizes(nn.Module):
    """Numbers and shapes computed early are used late."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        n = t * d
        h = self.b(torch.relu(self.a(x)))
        return self.c(h.reshape(b, n)) / math.sqrt(n) + x.shape[1] / n


class Twice(nn.Module):
    """One module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.shared(torch.relu(self.shared(self.a(x)))))


class LateInput(nn.Module):
    """Two inputs; only the last module needs the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.head(self.b(self.a(x).relu()) * weight)


class Tokens(nn.Module):
    """Integers cross a boundary: the tokens themselves, and the result of an argmax."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.mid, self.late = nn.Embedding(8, 6), nn.Linear(6, 8), nn.Embedding(8, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.mid(self.early(tokens))
        best = scores.argmax(-1)
        return self.head(self.late(best) + self.late(tokens) + scores[..., :6])


class Views(nn.Module):
    """A transposed view crosses a boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(4, 4), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).transpose(1, 2)
        h = self.b(h)[:, :, :3]
        return self.head(h.transpose(1, 2))


class InPlace(nn.Module):
    """Modules that overwrite their input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)
        self.act2, self.head = nn.SiLU(inplace=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act2(self.b(self.act(self.a(x)))))


class FrozenFirst(nn.Module):
    """The first stage has no trainable parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b, self.head = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        for p in (*self.embed.parameters(), *self.a.parameters()):
            p.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.b(self.a(self.embed(tokens))).relu())


class FrozenTied(nn.Module):
    """A table that two stages share and that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight
        self.embed.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mid(self.embed(tokens)))


class Functional(nn.Module):
    """The glue uses the output table, not a module: the table is still tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.norm = nn.Embedding(8, 6), nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.norm(self.mid(self.embed(tokens))), self.embed.weight)


class Bare(nn.Module):
    """A module without parameters that may be a stage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.head = nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.a(x)))


class Unused(nn.Module):
    """Parameters that no output depends on, on each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.a.extra, self.head.extra = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x))


class Normed(nn.Module):
    """A BatchNorm, and another one that its owner has put into evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3)
        self.norm2.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.first(x)))
        x = torch.relu(self.norm2(self.second(x)))
        return self.head(self.pool(x).flatten(1))


class Thrice(nn.Module):
    """One table under three names, used early, in the middle and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.again, self.c, self.head = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 8, bias=False)
        self.again.weight = self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.b(torch.tanh(self.a(self.embed(tokens))))
        return self.head(self.c(self.again(tokens) + h))
