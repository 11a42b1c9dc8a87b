"""Common architectures, as people write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.zoo.case import D, block, image, odd, sequence, tokens


@image("down1", "down2", "mid", "up2", "up1", "head")
class UNet(nn.Module):
    """Skips joined by cat, with max pooling and transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.mid = nn.Conv2d(8, 8, 3, padding=1)
        self.up2, self.up1 = nn.ConvTranspose2d(16, 4, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)
        self.head = nn.Linear(4, D)

    def forward(self, x: Tensor) -> Tensor:
        p = F.max_pool2d(self.down1(x).tanh(), 2)
        q = F.max_pool2d(self.down2(p).tanh(), 2)
        h = self.mid(q).tanh()
        h = self.up2(torch.cat([h, q], 1)).tanh()
        h = self.up1(torch.cat([h, p], 1)).tanh()
        return self.head(h.mean((-2, -1)))


class _Residual(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(n, n, 3, padding=1, bias=False), nn.BatchNorm2d(n)
        self.conv2, self.bn2 = nn.Conv2d(n, n, 3, padding=1, bias=False), nn.BatchNorm2d(n)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(h))
        out += x
        return F.relu(out, inplace=True)


@image("stem", "r1", "r2", "head")
class ResidualNet(nn.Module):
    """Residual blocks with batch norm and ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.r1, self.r2 = nn.Conv2d(3, 4, 3, stride=2), _Residual(4), _Residual(4)
        self.head = nn.Linear(4, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(F.adaptive_avg_pool2d(self.r2(self.r1(self.stem(x))), 1), 1))


@image("a", "b", "c", "head")
class PixelShuffle(nn.Module):
    """Channels last, pixel shuffle, depthwise and dilated convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 16, 3, padding=2, dilation=2, groups=4)
        self.c, self.head = nn.Conv2d(4, 4, 3, stride=2), nn.Linear(4 * 49, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x.contiguous(memory_format=torch.channels_last)).tanh()
        h = F.pixel_shuffle(self.b(h), 2)
        return self.head(self.c(h).flatten(1))


@sequence("inp", "rnn", "mid", "head")
class Lstm(nn.Module):
    """An LSTM of two layers, both directions, batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mid, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.rnn = nn.LSTM(D, 4, 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        out, (h, _) = self.rnn(self.inp(x))
        return self.head(self.mid(out).tanh() + h.sum(0).repeat(1, 2)[:, None])


@sequence("inp", "rnn", "mid", "head")
class Gru(nn.Module):
    """A GRU, time first, and its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mid, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.rnn = nn.GRU(D, D)

    def forward(self, x: Tensor) -> Tensor:
        out, last = self.rnn(self.inp(x).transpose(0, 1))
        return self.head(self.mid(out.transpose(0, 1)).tanh() * last[0][:, None])


@sequence("cell", "mid", "head")
class GruCell(nn.Module):
    """A cell called once a time step, in the glue."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.mid, self.head = nn.GRUCell(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(len(x), D), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            out.append(h)
        return self.head(self.mid(torch.stack(out, 1)).tanh())


@sequence("inp", "t.encoder.layers.0", "t.decoder.layers.0", "head")
class Transformer(nn.Module):
    """nn.Transformer, encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(D, D), nn.Linear(D, D)
        self.t = nn.Transformer(D, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=h.dtype)
        return self.head(self.t(h, h.flip(1), tgt_mask=mask))


@tokens("embed", "enc.layers.0", "enc.layers.1", "enc.layers.2", "head")
class Encoder(nn.Module):
    """nn.TransformerEncoder, norm first, with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, D), nn.Linear(D, 8)
        layer = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.enc(self.embed(x), src_key_padding_mask=x == 7))


@sequence("inp", "attn", "cross", "head")
class Attention(nn.Module):
    """MultiheadAttention as self- and cross-attention, with its attention weights used."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(D, D), nn.Linear(D, D)
        self.attn = nn.MultiheadAttention(D, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(D, 2, batch_first=True, kdim=D, vdim=D, add_bias_kv=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        h, w = self.attn(h, h, h)
        g, _ = self.cross(h, x, x, need_weights=False)
        return self.head(h + g + w.mean(-1, keepdim=True))


@sequence("q", "k", "v", "o", "head")
class Einsum(nn.Module):
    """Attention by einsum, projections as modules, everything else in the glue."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.head = (nn.Linear(D, D) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (2, 4)) for m in (self.q, self.k, self.v))
        w = torch.einsum("bqhd,bkhd->bhqk", q, k).div(2).softmax(-1)
        return self.head(self.o(torch.einsum("bhqk,bkhd->bqhd", w, v).flatten(2)).tanh())


@sequence("inp", "mid", "head")
class Scan(nn.Module):
    """A state space scan in the glue, with its rates as a root parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mid, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.log_rate = nn.Parameter(torch.linspace(-2, 0, D))

    def forward(self, x: Tensor) -> Tensor:
        u, rate = self.inp(x), torch.exp(-torch.exp(self.log_rate))
        state, out = torch.zeros_like(u[:, 0]), []
        for t in range(u.shape[1]):
            state = rate * state + u[:, t]
            out.append(state)
        return self.head(self.mid(torch.stack(out, 1)).tanh())


@odd("encode", "mean", "spread", "decode")
class Variational(nn.Module):
    """A variational autoencoder whose noise is a fixed buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.spread, self.decode = block(), nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.register_buffer("noise", torch.linspace(-1, 1, D))
        self.noise: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = self.encode(x)
        return self.decode(self.mean(h) + self.noise * (0.5 * self.spread(h)).exp())


@odd("online.0", "online.1", "predict", "target.0", "target.1", "head")
class Byol(nn.Module):
    """An online network, and a target under no_grad whose similarity the head uses."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Sequential(block(), block()), nn.Sequential(block(), block())
        self.predict, self.head = nn.Linear(D, D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        p = self.predict(self.online(x))
        with torch.no_grad():
            z = self.target(x.flip(-1))
        return self.head(torch.cat([p, F.cosine_similarity(p, z, dim=-1)[:, None] * z], -1))


@sequence("proj", "code", "mid", "head")
class VectorQuantized(nn.Module):
    """The nearest of eight codes, with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.code = nn.Linear(D, D), nn.Embedding(8, D)
        self.mid, self.head = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        best = torch.cdist(h, self.code.weight[None]).argmin(-1)
        code = self.code(best)
        h = h + (code - h).detach() + 0.1 * code
        return self.head(self.mid(h).tanh())
