"""Constructors that check their device, and others that a recording could get wrong: a class for each."""

from __future__ import annotations

import copy
import functools
import io
import math
import random
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

SIZE = (24, 16)


FILE = io.BytesIO()
torch.save({"weight": torch.full(SIZE, 3.0), "bias": torch.arange(24.0)}, FILE)


def saved() -> io.BytesIO:
    FILE.seek(0)
    return FILE


class Made(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class One(Made):
    """A weight without values, which a subclass fills."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIZE))
        self.fill()

    def fill(self) -> None:
        raise NotImplementedError


class SkipsOnMeta(One):
    def fill(self) -> None:
        if self.weight.device.type != "meta":
            nn.init.normal_(self.weight, std=0.02)


class SkipsWhatIsMeta(One):
    def fill(self) -> None:
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=0.02)


class OnlyOnTheCpu(One):
    def fill(self) -> None:
        here = (self.weight.is_cpu, str(self.weight.device), self.weight.type(), self.weight.get_device())
        if here == (True, "cpu", "torch.FloatTensor", -1):
            nn.init.normal_(self.weight, std=0.02)


class AsksTheDefaultDevice(One):
    def fill(self) -> None:
        if torch.get_default_device().type == "cpu" and torch.tensor([]).device.type == "cpu":
            nn.init.normal_(self.weight, std=0.02)


class Flagged(Made):
    """Marks each initialized weight, as transformers does, and initializes the others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 24), nn.Linear(16, 24)
        nn.init.zeros_(self.a.weight)
        self.a.weight._initialized = True
        for module in (self.a, self.b):
            if not getattr(module.weight, "_initialized", False):
                nn.init.normal_(module.weight, std=0.02)


class SkipInit(Made):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.utils.skip_init(nn.Linear, 16, 24)
        nn.init.trunc_normal_(self.inner.weight, std=0.02)
        nn.init.zeros_(self.inner.bias)


class MetaThenEmpty(Made):
    """Makes shapes on the meta device first and allocates memory later."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.inner = nn.Linear(16, 24)
        was = self.inner.weight.device.type
        self.inner.to_empty(device="cpu")
        nn.init.normal_(self.inner.weight, std=0.02 if was == "meta" else 9.0)
        nn.init.constant_(self.inner.bias, 0.5)


class Written(Made):
    """Writes under ``no_grad``, through ``.data``, in parts and by ``copy_``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.empty(SIZE)) for _ in range(3))
        with torch.no_grad():
            self.a.copy_(torch.randn(SIZE) * 0.02)
            self.a[0] = 1
            self.b[:10] = 3
            self.b[10:].uniform_(-1, 1)
        self.c.data = torch.linspace(0, 1, 24 * 16).reshape(SIZE)
        self.c.data.mul_(2).add_(self.a.data)


class Numpy(Made):
    """Values from numpy: copied, shared and read."""

    def __init__(self) -> None:
        super().__init__()
        table = np.outer(np.arange(24.0), np.ones(16)).astype(np.float32)
        self.shared = nn.Parameter(torch.from_numpy(table))
        self.copied = nn.Parameter(torch.empty(SIZE))
        self.copied.data.copy_(torch.from_numpy(table) / 7)
        self.taken = nn.Embedding(24, 16)
        self.taken.weight.data = torch.as_tensor(table * 3)
        self.legacy = nn.Parameter(torch.Tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.scale = float(self.copied.detach().numpy().std())
        self.w = nn.Parameter(torch.randn(SIZE) * self.scale)
        self.register_buffer("eigen", torch.as_tensor(np.linalg.eigvalsh(np.asarray(torch.eye(4) * 2))))


class Laws(Made):
    """Special initializations: orthogonal, dirac, eye, sparse, and normals truncated around zero or to a tail."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("orthogonal", "eye", "sparse", "inner", "outer", "gain"):
            self.register_parameter(name, nn.Parameter(torch.empty(SIZE)))
        self.dirac = nn.Parameter(torch.empty(6, 6, 3))
        nn.init.orthogonal_(self.orthogonal)
        nn.init.eye_(self.eye)
        nn.init.sparse_(self.sparse, 0.5)
        nn.init.trunc_normal_(self.inner, std=0.02)
        nn.init.trunc_normal_(self.outer, std=1.0, a=1.5, b=2.0)
        nn.init.xavier_uniform_(self.gain, gain=nn.init.calculate_gain("tanh") / math.sqrt(2))
        nn.init.dirac_(self.dirac)


class Seeds(Made):
    """Two layers that are equal because of equal seeds, and two that start from the same random state."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            self.a = nn.Linear(16, 24)
            torch.manual_seed(11)
            self.b = nn.Linear(16, 24)
        before = torch.get_rng_state()
        self.c = nn.Linear(16, 24)
        torch.set_rng_state(before)
        self.d = nn.Linear(16, 24)


class OwnGenerators(Made):
    """Generators of the constructor's own, used in turn."""

    def __init__(self) -> None:
        super().__init__()
        g, h = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
        self.a = nn.Parameter(torch.randn(SIZE, generator=g))
        self.b = nn.Parameter(torch.randn(4, 2, generator=h))
        self.c, self.d = nn.Parameter(torch.empty(SIZE)), nn.Parameter(torch.empty(SIZE))
        nn.init.normal_(self.c, generator=g)
        nn.init.trunc_normal_(self.d, generator=h)
        g.manual_seed(3)
        self.e = nn.Parameter(torch.randn(SIZE, generator=g))
        self.order = torch.randperm(24, generator=g)


class OtherSources(Made):
    """Random numbers of numpy and of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(np.random.randn(*SIZE)))
        self.b = nn.Parameter(torch.randn(SIZE) * random.random())
        self.width = random.randint(2, 9)
        self.c = nn.Linear(self.width, 4)


class Looks(Made):
    """Loops, branches and scales that depend on random numbers."""

    def __init__(self) -> None:
        super().__init__()
        w = torch.randn(SIZE)
        while w.abs().max() > 2.5:
            w = torch.where(w.abs() > 2.5, torch.randn(SIZE), w)
        self.w = nn.Parameter(w)
        self.normed = nn.Parameter(w / w.norm().item())
        self.picked = nn.Parameter(w[w > 0.5])
        self.places = torch.nonzero(w > 2.0)
        self.same = torch.equal(w, w.clone()) and torch.allclose(w, w + 0)
        self.shift = nn.Parameter(torch.zeros(3) + self.same)
        self.values = torch.unique(torch.randint(0, 5, (40,)))


class Outside(Made):
    """Uses tensors that existed before the constructor, and changes one after its use."""

    table: ClassVar[Tensor] = torch.arange(24.0 * 16).reshape(SIZE)

    def __init__(self) -> None:
        super().__init__()
        mine = self.table.clone()
        self.a = nn.Parameter(torch.zeros(SIZE) + mine)
        mine.mul_(2)
        self.b = nn.Parameter(mine)
        self.c = nn.Parameter(torch.zeros(SIZE).copy_(mine))
        self.d = nn.Parameter(self.table.t() @ self.a.detach())
        loaded = torch.load(saved(), weights_only=True)
        self.inner = nn.Linear(16, 24)
        self.inner.load_state_dict(loaded)
        self.rest = copy.deepcopy(self.inner)


class Loads(Made):
    """Loads its weights from a file."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 24)
        self.inner.load_state_dict(torch.load(saved(), weights_only=True), assign=True)


@functools.cache
def mask(n: int) -> Tensor:
    return torch.tril(torch.ones(n, n))


class Caches(Made):
    """A constant that the first construction computes and caches for all others."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", mask(7), persistent=False)
        self.w = nn.Parameter(mask(5) * 2 + torch.randn(5, 5))


class Moves(Made):
    """Moves to the CPU and to other dtypes; a tensor that is already there is returned and not copied."""

    def __init__(self) -> None:
        super().__init__()
        w = torch.zeros(SIZE)
        w.to("cpu").add_(1)
        w.cpu().mul_(3)
        w.to(device="cpu", dtype=torch.float32).add_(0.5)
        self.w = nn.Parameter(w)
        self.inner = nn.Linear(16, 24).to(torch.float64).to("cpu")
        self.half = nn.Linear(16, 24, dtype=torch.bfloat16).float()
        self.on = nn.Parameter(torch.randn(SIZE, device=self.w.device))


class Tied(Made):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.head.weight, std=0.02)


class Rotary(Made):
    """Buffers, persistent and not persistent, and a plain tensor attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)), persistent=False)
        self.register_buffer("angles", torch.outer(torch.arange(6.0), self.inv_freq).cos())
        self.slopes = torch.tensor([2.0 ** -(n + 1) for n in range(4)])
        self.w = nn.Parameter(torch.ones(3))


class Blocks(Made):
    """Initializes by ``apply``, with a scale that depends on the depth."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.rnn, self.conv = nn.GRU(16, 8), nn.ConvTranspose1d(4, 6, 3)
        self.apply(self._init)
        for name, p in self.named_parameters():
            if name.endswith("linear2.weight"):
                nn.init.normal_(p, std=0.02 / math.sqrt(4))

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.weight.device != torch.device("meta"):
            module.weight.data.normal_(0.0, 0.02)
            module.bias.data.zero_()


class Dtypes(Made):
    """Another default dtype, complex numbers, and the results of ``new_tensor``."""

    def __init__(self) -> None:
        super().__init__()
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        self.low = nn.Linear(16, 24)
        torch.set_default_dtype(before)
        self.complex = nn.Parameter(torch.randn(3, 4, dtype=torch.cfloat))
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.same = nn.Parameter(self.low.weight.new_tensor([1, 2.5]))


class Draws(Made):
    """Draws random numbers by other functions than those of ``nn.init``."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.bernoulli(torch.full((90,), 0.5)))
        self.b = nn.Parameter(torch.normal(torch.zeros(4), torch.ones(4)))
        self.c = nn.Parameter(torch.distributions.Beta(2.0, 3.0).sample((5,)))
        self.d = nn.Parameter(torch.multinomial(torch.ones(5), 3).float())
        self.q = nn.Parameter(torch.linalg.qr(torch.randn(6, 4))[0])
        self.stacked = nn.Parameter(torch.stack([torch.tensor([n, n + 1.0]) for n in range(3)]))
        self.old = nn.Parameter(torch.cat([torch.zeros(2), torch.FloatTensor([4.0, 5.0])]))
        with torch.no_grad():
            self.stacked[torch.tensor([0, 2])] = 5.0
            self.stacked.masked_fill_(self.stacked > 4.0, 7.0)
            self.old.index_fill_(0, torch.tensor([1]), 3.0)


class OtherDtypes(Made):
    """Views of another dtype: parts of complex numbers (S4, Hyena, LRU), bits (packed weights)."""

    def __init__(self) -> None:
        super().__init__()
        wave, x = torch.exp(1j * torch.randn(SIZE)), torch.randn(SIZE)
        for name, t in {
            "real": wave.real, "imag": wave.imag, "conj": wave.conj().imag, "pairs": torch.view_as_real(wave),
            "one": wave[3, 2].imag, "row": wave.imag[:1].expand(SIZE),
            "complex": torch.view_as_complex(x[:, :2].contiguous()),
            "bits": x.view(torch.int32) % 7, "halves": x.bfloat16().view(torch.int16), "bytes": x.view(torch.uint8),
            "eighth": x.to(torch.float8_e4m3fn).view(torch.uint8),
            "signless": (x.view(torch.int32) & 0x7FFFFFFF).view(torch.float32),
        }.items():  # fmt: skip
            self.register_buffer(name, t)
        self.register_buffer("doubled", (lambda z: (z.real.mul_(2), z)[1])(wave.clone()))
        self.register_buffer("cleared", (lambda z: (z.view(torch.int32).bitwise_and_(0xFF), z)[1])(x.clone()))


class OtherStrides(Made):
    """Results whose strides on the CPU differ from those of the meta device (PiSSA, LoftQ, images)."""

    def __init__(self) -> None:
        super().__init__()
        m, image = torch.randn(8, 8), torch.randn(1, 5, 4, 3).to(memory_format=torch.channels_last)
        u, s, vh = torch.linalg.svd(m)
        values, vectors = torch.linalg.eig(m)
        for name, t in {
            "vh": vh.contiguous(), "us": u * s, "flat": vh.flatten(), "part": vh[1:3, 2:], "split": vh.split(3, 1)[1],
            "column": vh.unbind(1)[1], "scaled": torch.linalg.svd(m)[2][1:3].mul_(2), "v": torch.svd(m)[2],
            "thin": torch.linalg.svd(m[:, :3], False)[2],
            "vectors": vectors.real, "values": values.imag, "diagonal": vectors.diagonal().real,
            "rfft2": torch.fft.rfft2(image, dim=(0, 1)).abs(),
            "conv": nn.functional.conv2d(image, torch.ones(2, 5, 1, 1)),
            "transposed": nn.functional.conv_transpose2d(image, torch.ones(5, 2, 2, 2)),
            "stft": torch.stft(m.flatten(), 8, 2, window=torch.ones(8), return_complex=True).real,
        }.items():  # fmt: skip
            self.register_buffer(name, t)


class LooksAtStrides(Made):
    """Whether it also changes ``b`` depends on the strides that LAPACK chooses, which no replay can know."""

    def __init__(self) -> None:
        super().__init__()
        vh = torch.linalg.svd(torch.randn(6, 6))[2]
        self.b = nn.Parameter(vh.contiguous())
        vh[1:3].mul_(2)


class Places(Made):
    """Indexes by lists and arrays."""

    def __init__(self) -> None:
        super().__init__()
        x = torch.randn(SIZE)
        self.register_buffer("rows", x[[0, 2]])
        self.register_buffer("columns", x.T[:, [True, *[False] * 22, True]])
        self.register_buffer("array", x[np.arange(3)])
        x[[1, 4]] = 0.0
        self.register_buffer("written", x)


class Normalizes(Made):
    """Statistics from batches that the constructor passes through its layers (LSUV, ActNorm, calibration)."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.mean, self.instance = nn.BatchNorm1d(8, momentum=None), nn.InstanceNorm1d(8, track_running_stats=True)
        x = torch.randn(9, 6)
        self.norm(self.lin(x))
        with torch.no_grad():
            y = self.mean(self.norm(self.lin(2 * x)))
            self.mean(y + 1)
        self.instance(torch.randn(3, 8, 5))
        self.register_buffer("scale", self.norm.running_var.rsqrt())


class Resizes(Made):
    """Results that go into tensors without elements, or with fewer."""

    def __init__(self) -> None:
        super().__init__()
        joined, counted, wider = torch.empty(0), torch.empty(0), torch.zeros(3)
        torch.cat([torch.ones(5), torch.randn(7)], out=joined)
        torch.arange(5.0, out=counted)
        wider.resize_(4, 3).normal_()
        self.joined, self.counted, self.wider = (nn.Parameter(t) for t in (joined, counted, wider))


EXACT = [
    SkipsOnMeta, SkipsWhatIsMeta, OnlyOnTheCpu, AsksTheDefaultDevice, Flagged, SkipInit, MetaThenEmpty, Written, Numpy,
    Laws, Seeds, OwnGenerators, OtherSources, Looks, Loads, Outside, Caches, Moves, Tied,
    Rotary, Blocks, Dtypes, Draws, OtherDtypes, OtherStrides, Places, Normalizes, Resizes,
]  # fmt: skip


class KeepsFloat32(nn.Module):
    """A buffer stays in float32 whatever the model is moved or cast to."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("f", torch.arange(4.0) / 3)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self.f = self.f.float()
        return self


class Float32Buffers(nn.Module):
    """Has buffers that are float32 tensors of arrays and lists, with no operation in between."""

    def __init__(self) -> None:
        super().__init__()
        array = np.arange(6, dtype=np.float32) / 7
        self.register_buffer("array", torch.from_numpy(array))
        self.register_buffer("numbers", torch.tensor([0.1, 0.2], dtype=torch.float32))
        self.register_buffer("both", self.numbers)
        self.weight = nn.Parameter(torch.from_numpy(array))
        self.register_buffer("ids", torch.from_numpy(np.arange(3)))
