"""Values with unusual paths through the glue: masks, sorts, contexts, generators, loops."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import reduce

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.parity.zoo.case import ABCD, D, Net, block, odd, sequence


@odd(*ABCD)
class MaskAssigned(Net):
    """``h[h < 0] *= 0.1`` in the glue."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)) * 1.0
        h[h < 0] *= 0.1
        return self.d(self.c(h))


@odd(*ABCD)
class MaskFilled(Net):
    """A mask from an early stage fills a value of a late stage in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        mask = h > 0.3
        h = self.c(self.b(h)).clone()
        h.masked_fill_(mask, 0.5)
        return self.d(h)


@odd(*ABCD)
class Sorted(Net):
    """Values are sorted early and restored to their order late."""

    def forward(self, x: Tensor) -> Tensor:
        h, order = self.a(x).sort(dim=1)
        h = self.c(self.b(h))
        return self.d(torch.zeros_like(h).scatter_(1, order, h))


@odd(*ABCD)
class IndexPut(Net):
    """index_add_ and index_put_ with indices from a buffer."""

    def extra(self) -> None:
        self.register_buffer("places", torch.tensor([1, 1, 3]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        out = torch.zeros_like(h).index_add_(1, self.places, h[:, :3])
        out.index_put_((torch.arange(len(h)), torch.zeros(len(h), dtype=torch.int64)), h[:, 4], accumulate=True)
        return self.d(self.c(out))


@odd(*ABCD)
class OutVariant(Net):
    """``torch.add(..., out=)`` under no_grad into a new tensor."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        with torch.no_grad():
            room = torch.empty_like(h)
            torch.add(h, 1.0, out=room)
        return self.d(self.c(h) * room)


@odd(*ABCD)
class DetachedInPlace(Net):
    """``h.detach_()`` stops the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)) * 1.0
        h.detach_()
        return self.d(self.c(h) + self.a(x))


@odd(*ABCD)
class RetainsGrad(Net):
    """The glue retains the gradient of an inner value."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        h.retain_grad() if h.requires_grad else None
        return self.d(self.c(h))


@odd(*ABCD)
class SavedHooks(Net):
    """Hooks in the glue round what autograd saves in two blocks."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with saved_tensors_hooks(lambda t: t.float(), lambda t: t.double()):
            h = self.c(self.b(h))
        return self.d(h)


class _Rounds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: t.float(), lambda t: t.double()):
            out: Tensor = self.net(x)
        return out


@odd(*ABCD)
class SavedHooksInside(Net):
    """Hooks within a module round what autograd saves."""

    def extra(self) -> None:
        self.b = _Rounds()


@odd(*ABCD)
class ReadsGradient(Net):
    """The glue reads the gradient that earlier backwards have left on a weight."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        grad = self.c[0].weight.grad
        return self.d(self.c(h) if grad is None else self.c(h) / (1 + grad.norm()))


@odd(*ABCD)
class SavedOnCpu(Net):
    """Two blocks under save_on_cpu."""

    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            h = self.b(self.a(x))
        return self.d(self.c(h))


@sequence("a", "b", "c", "d")
class SdpaKernel(Net):
    """Attention in the glue under a context that chooses its kernel."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.a(x), self.b(x)
        with sdpa_kernel(SDPBackend.MATH):
            h = F.scaled_dot_product_attention(q, k, x, is_causal=True)
        return self.d(self.c(h))


@odd(*ABCD)
class SeedsItself(Net):
    """Noise from torch's own stream, which the forward seeds and restores."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            noise = torch.randn(D, dtype=x.dtype)
        return self.d(self.c(self.b(self.a(x)) + noise))


@odd(*ABCD)
class OwnGeneratorKept(Net):
    """A generator of the root is seeded at every call."""

    def extra(self) -> None:
        self.dice = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        self.dice.manual_seed(3)
        h = self.b(self.a(x)) + torch.randn(D, generator=self.dice, dtype=x.dtype)
        return self.d(self.c(h))


@odd(*ABCD)
class DefaultDtype(Net):
    """New tensors between two blocks are in another default dtype."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        h = self.b(h) + torch.full((D,), 0.1)
        torch.set_default_dtype(before)
        return self.d(self.c(h))


@odd(*ABCD)
class FromNumpy(Net):
    """A numpy table is converted to a tensor in the forward."""

    def extra(self) -> None:
        self.table = np.linspace(0, 1, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)) + torch.from_numpy(self.table).to(x)
        return self.d(self.c(h) * torch.tensor([0.5] * D, dtype=x.dtype))


@odd(*ABCD)
class Generators(Net):
    """Blocks come from a generator, and values pass through reduce and zip."""

    def blocks(self) -> Iterator[nn.Module]:
        yield from (self.a, self.b, self.c)

    def forward(self, x: Tensor) -> Tensor:
        hs = list(itertools.accumulate(self.blocks(), lambda h, m: m(h), initial=x))
        return self.d(reduce(lambda a, b: a + b[0] * b[1], zip(hs, (0.5, 0.25, 2.0, 1.0), strict=True), x))


@odd(*ABCD)
class Slices(Net):
    """Parts of one value go through different blocks and are added in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).clone()
        left, right = h[:, : D // 2], h[:, D // 2 :]
        left *= 2
        right += self.b(h.clone())[:, : D // 2]
        return self.d(self.c(torch.cat([right, left], 1)) + h)


@odd(*ABCD)
class OutputIsView(Net):
    """The logits are a view of a longer tensor, the rest of which was changed."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.d(self.c(self.b(self.a(x)))), x], 1)
        h[:, D:] = 0
        return h[:, :D]


@odd(*ABCD)
class KeepsTimes(Net):
    """A list of the root grows with every call, and nothing reads it."""

    def extra(self) -> None:
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return self.d(self.c(self.b(self.a(x))))


@odd(*ABCD)
class GradientScaled(Net):
    """A hook that the glue puts on a value between stages needs the gradients of both its users."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda g: g / (1 + g.norm()))
        return self.d(self.c(self.b(h)) + h)


@odd(*ABCD)
class BatchCentered(Net):
    """The mean over the micro batch is subtracted between the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return self.d(self.c(h - h.mean(0)))


class _PreBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()
        self.register_full_backward_pre_hook(lambda m, g: tuple(t * 0.5 for t in g))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


@odd(*ABCD)
class BackwardPreHook(Net):
    """A hook before a block's backward halves the incoming gradient."""

    def extra(self) -> None:
        self.b = _PreBackward()


@odd(*ABCD)
class Traced(Net):
    """A block is traced by TorchScript."""

    def extra(self) -> None:
        self.b = torch.jit.trace(block(), torch.zeros(1, D))


@odd(*ABCD)
class StatefulLstm(Net):
    """The final state of one LSTM is the initial state of another."""

    def extra(self) -> None:
        self.b, self.c = (nn.LSTM(D, D, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h, state = self.b(self.a(x).unsqueeze(1).expand(-1, 3, -1))
        h, _ = self.c(h, state)
        return self.d(h[:, -1])


@odd(*ABCD)
class NumbersOfWeights(Net):
    """The glue reads sizes and the dtype of late blocks at the start."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(self.d.weight.dtype) / self.d.in_features**0.5
        h = self.a(h) * len(self.c) + self.c[0].weight.shape[0]
        return self.d(self.c(self.b(h)))


class _Asking(nn.Module):
    """Doubles its result if a tensor that it computes from its input is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.net(x) * 1.0
        return h if (x * 0.5).is_contiguous() else h * 2.0


@odd(*ABCD)
class ColumnsFirst(Net):
    """A block checks the strides of a tensor that it computes from a transposed input."""

    def extra(self) -> None:
        self.c = _Asking()

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return self.d(self.c(h.t().contiguous().t()))


@odd(*ABCD)
class EverySecond(Net):
    """A block checks the strides of its input, which has gaps."""

    def extra(self) -> None:
        self.c = _Asking()

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return self.d(self.c(torch.stack((h, h), -1)[..., 0]))
