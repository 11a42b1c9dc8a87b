"""Odd names, odd classes, odd outputs, and tools of torch that change modules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim.swa_utils import AveragedModel

from tests.parity.zoo.case import ABCD, D, Net, block, odd, sequence, tokens


@odd("parts.a-b", "parts.c d", "parts.ünï", "parts.*")
class OddNames(nn.Module):
    """Keys with dashes, spaces, letters of other alphabets, and a star."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a-b": block(), "c d": block(), "ünï": block(), "*": nn.Linear(D, D)})

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


@odd("weight", "bias", "module", "stage")
class NamedLikeTensors(nn.Module):
    """Modules are named weight, bias, module and stage."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.module, self.stage = block(), block(), block(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.stage(self.module(self.bias(self.weight(x))))


class _Falsy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def __len__(self) -> int:
        return 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


@odd("a", "falsy", "c", "d")
class FalsyModule(Net):
    """A module of length 0; the glue checks that it is not None."""

    def extra(self) -> None:
        self.falsy = _Falsy()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.falsy is not None:
            h = self.falsy(h)
        return self.d(self.c(h))


@dataclass(eq=False)
class _Sized(nn.Module):
    size: int = D

    def __post_init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(self.size, self.size)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.net(x))


@odd("a", "sized", "c", "d")
class DataclassModule(Net):
    """A module that is a dataclass."""

    def extra(self) -> None:
        self.sized = _Sized()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.sized(self.a(x))))


@odd("a", "b", "c", "d")
class Lazy(Net):
    """A layer that learns its width from its first input."""

    def extra(self) -> None:
        self.c = nn.LazyLinear(D)


@odd(*ABCD)
class Pruned(Net):
    """Pruned weights: a mask in a buffer, applied by a pre-forward hook."""

    def extra(self) -> None:
        prune.custom_from_mask(self.d, "weight", torch.eye(D) + torch.eye(D).roll(1, 0))


@odd(*ABCD)
class Averaged(Net):
    """torch's AveragedModel as a teacher, updated in the forward."""

    def extra(self) -> None:
        self.average = AveragedModel(self.b)
        self.average.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.average.update_parameters(self.b)
        return self.d(self.c(self.b(h) + self.average(h)))


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(D, D, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), 6) - torch.arange(len(x)) % 3
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=6)
        return out


@sequence("a", "packed", "c", "d")
class PackedSequences(Net):
    """A recurrent net over packed sequences of different lengths."""

    def extra(self) -> None:
        self.packed = _Packed()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.packed(self.a(x))))


@sequence("qkv", "out", "c", "d")
class FusedAttention(Net):
    """scaled_dot_product_attention in the glue, causal, over views of one projection."""

    def extra(self) -> None:
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        del self.a, self.b

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.d(self.c(self.out(h) + x))


@tokens("embed", "a", "b", "d")
class FlatOutput(Net):
    """The result has positions and samples in one dimension."""

    def extra(self) -> None:
        self.embed = nn.Embedding(8, D)
        del self.c

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.b(self.a(self.embed(x)))).flatten(0, 1)


@odd(*ABCD, target=(2,), classes=4)
class TwoTargets(Net):
    """Two classifications per sample, each of four classes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(-1, (2, 4))


@odd(*ABCD)
class MixtureOfLogits(Net):
    """Logits are log-probabilities of a mixture of two heads."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        both = torch.stack([self.d(h).log_softmax(-1), self.d(self.c(h)).log_softmax(-1)])
        return both.logsumexp(0)


@odd("a.0", "a.1.0", "a.1.1", "d")
class Ragged(nn.Module):
    """The split goes through the inside of a nested module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = nn.Sequential(block(), nn.Sequential(block(), block())), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.a(x) + x)


@odd("a", "b", "net", "d")
class Bilinear(Net):
    """A bilinear layer of an early value and a late one."""

    def extra(self) -> None:
        self.net = nn.Bilinear(D, D, D)
        del self.c

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.d(self.net(h, self.b(h)))


@odd(*ABCD)
class ConstantInput(Net):
    """A block gets a learned query and not the input: its work does not depend on the batch."""

    def extra(self) -> None:
        self.query = nn.Parameter(torch.randn(1, D))

    def forward(self, x: Tensor) -> Tensor:
        prior = self.a(self.query)
        return self.d(self.c(self.b(x) * prior))


@odd(*ABCD)
class NoGradientIntoFirst(Net):
    """The last stages depend on the first only through rounding: no gradient flows back."""

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x)).round()))


@odd(*ABCD)
class IndependentStages(Net):
    """No block depends on another: their results are added."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x) + self.c(x) + self.d(x)
