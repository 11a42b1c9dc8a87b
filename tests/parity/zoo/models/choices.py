"""Models whose path depends on data, a count of calls, or the mode."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.parity.zoo.case import ABCD, D, Net, block, odd, sequence


class _Experts(nn.Module):
    """``top`` of four experts per token, the others idle; ``bias`` pushes tokens to the first."""

    def __init__(self, top: int, bias: float = 0.0) -> None:
        super().__init__()
        self.top, self.gate = top, nn.Linear(D, 4)
        self.experts = nn.ModuleList(block() for _ in range(4))
        self.register_buffer("bias", torch.tensor([bias, 0.0, 0.0, 0.0]))
        self.bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = (self.gate(x) + self.bias).softmax(-1).topk(self.top, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, place = (chosen == e).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, place, None])
        return out


class _Mixed(Net):
    top, bias = 1, 0.0

    def extra(self) -> None:
        self.moe = _Experts(self.top, self.bias)
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.d(self.c(h + self.moe(h)))


@odd("a", "moe", "c", "d")
class Top1(_Mixed):
    """Experts in a module, one per token."""


@odd("a", "moe", "c", "d")
class Top2(_Mixed):
    """Experts, two per token."""

    top = 2


@odd("a", "moe", "c", "d")
class IdleExperts(_Mixed):
    """Nearly all tokens go to the first expert: the others are idle on most ranks."""

    bias = 2.5


@odd("a", "moe", "c", "d")
class OneExpert(_Mixed):
    """All tokens go to the first expert: the others never get a gradient."""

    bias = 50.0


class _Unequal(_Experts):
    def __init__(self, top: int, bias: float = 0.0) -> None:
        super().__init__(top, bias)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 3 + n), nn.Tanh(), nn.Linear(3 + n, D)) for n in range(4)
        )


@odd("a", "moe", "c", "d")
class UnequalExperts(_Mixed):
    """Experts of different sizes."""

    def extra(self) -> None:
        self.moe = _Unequal(1)
        del self.b


@odd("a", "gate", "e0", "e1", "d")
class ExpertsInGlue(nn.Module):
    """Two experts called by the glue on the tokens that chose them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.gate, self.e0, self.e1, self.d = block(), nn.Linear(D, 2), block(), block(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        chosen = self.gate(h).argmax(-1)
        out = torch.zeros_like(h)
        out[chosen == 0] = self.e0(h[chosen == 0])
        out[chosen == 1] = self.e1(h[chosen == 1])
        return self.d(out + h)


class _IfInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.yes, self.no = block(), block()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.yes(x) if x.sum() > 0 else self.no(x)
        return out


@odd("a", "choice", "c", "d")
class IfInModule(Net):
    """A module that chooses a branch by the sum of its input."""

    def extra(self) -> None:
        self.choice = _IfInside()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.choice(self.a(x))))


@odd(*ABCD)
class IfInGlue(Net):
    """The glue chooses a branch by a value of the first block."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = self.b(h) if h.sum() > 0 else self.c(h)
        return self.d(h)


@odd(*ABCD)
class IfOnShape(Net):
    """The glue looks at shapes and dtypes only."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.shape[-1] == D and h.dim() == 2 and h.is_floating_point():
            h = self.b(h)
        return self.d(self.c(h)) if len(h) > 1 else self.d(h)


class _Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = block(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.net(x) if self.calls % 3 else x


@odd("a", "drops", "c", "d")
class LayerDrop(Net):
    """A module leaves out its residual block at every third call."""

    def extra(self) -> None:
        self.drops = _Drops()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.drops(self.a(x))))


@odd(*ABCD)
class LayerDropInGlue(Net):
    """The glue leaves out a residual block at every third call, by a counter of the root."""

    def extra(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.a(x)
        if self.calls % 3:
            h = h + self.b(h)
        return self.d(self.c(h))


@odd(*ABCD)
class EarlyExit(Net):
    """The model returns early above a threshold that no value reaches."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        if h.abs().max() > 100:
            return h
        return self.d(self.c(h))


class _Fixpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(20):
            new = torch.tanh(0.3 * self.net(z) + x)
            if (new - z).norm() < 1e-2:
                return new
            z = new
        return z


@odd("a", "fix", "c", "d")
class Equilibrium(Net):
    """A deep equilibrium: a module iterates until it converges."""

    def extra(self) -> None:
        self.fix = _Fixpoint()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.fix(self.a(x))))


class _Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.join = nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 1:
            return x[:, 0]
        half = x.shape[1] // 2
        out: Tensor = self.join(torch.cat([self(x[:, :half]), self(x[:, half:])], -1)).tanh()
        return out


@sequence("a", "tree", "c", "d", target=())
class Recursive(Net):
    """A tree that calls itself on halves of a sequence."""

    def extra(self) -> None:
        self.tree = _Tree()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.tree(self.a(x))))


@odd(*ABCD)
class LoopByItem(Net):
    """The number of loops in the glue depends on a value."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for _ in range(1 + int(h.mean().item() > 0)):
            h = self.b(h)
        return self.d(self.c(h))


@odd(*ABCD)
class MaskedSelect(Net):
    """A boolean selection, whose size depends on the data, is added to the result."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        some = h[h > 0]
        return self.d(self.c(h)) + some.mean()


@odd(*ABCD)
class Where(Net):
    """A choice by torch.where, which is not a branch."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = torch.where(h.sum(-1, keepdim=True) > 0, self.b(h), self.c(h))
        return self.d(h)


@odd(*ABCD)
class ByTraining(Net):
    """Glue that differs between training and evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        if self.training:
            h = h * 2
        return self.d(self.c(h))
