"""Features of torch in a forward: checkpoint, script, compile, functional calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.parity.zoo.case import ABCD, D, Net, block, odd


class _Again(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = nn.Sequential(block(), block()), reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.net, x, use_reentrant=self.reentrant)
        return out


@odd("a", "again", "c", "d")
class CheckpointInside(Net):
    """Recomputation within a module, not reentrant."""

    reentrant = False

    def extra(self) -> None:
        self.again = _Again(self.reentrant)
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.again(self.a(x))))


@odd("a", "again", "c", "d")
class CheckpointReentrant(CheckpointInside):
    """Recomputation within a module, reentrant."""

    reentrant = True


@odd(*ABCD)
class CheckpointModule(Net):
    """One block is recomputed by the glue."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = checkpoint(self.b, h, use_reentrant=False)
        return self.d(self.c(h))


@odd(*ABCD)
class CheckpointGlue(Net):
    """A piece of glue over two blocks is recomputed."""

    def middle(self, x: Tensor) -> Tensor:
        return self.c(self.b(x) * 2) + x

    def forward(self, x: Tensor) -> Tensor:
        return self.d(checkpoint(self.middle, self.a(x), use_reentrant=False))


@odd(*ABCD)
class CheckpointSequential(Net):
    """checkpoint_sequential over three blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return self.d(checkpoint_sequential([self.a, self.b, self.c], 2, x, use_reentrant=False))


@odd(*ABCD)
class ScriptedModule(Net):
    """A block is a TorchScript module."""

    def extra(self) -> None:
        self.b = torch.jit.script(block())


@torch.jit.script
def _fused(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x) * y + 1.0


@odd(*ABCD)
class ScriptedGlue(Net):
    """A scripted function in the glue."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return self.d(_fused(self.c(h), h))


@odd(*ABCD)
class CompiledModule(Net):
    """A block is compiled (in eager mode) when the model is made."""

    def extra(self) -> None:
        self.b = torch.compile(self.b, backend="eager")  # type: ignore[assignment]


@odd(*ABCD)
class FunctionalCall(Net):
    """A block is called with other weights than its own."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = torch.func.functional_call(self.b, {"0.weight": self.c[0].weight * 0.5}, (h,))
        return self.d(self.c(h))


@odd(*ABCD)
class TorchFunctions(Net):
    """Many kinds of calls in the glue: methods, operators, torch functions, keyword dims."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = torch.stack([h, -h, h**2], dim=0).sum(dim=0).clamp(min=-2)
        h, _ = self.b(h).sort(dim=-1, descending=True)
        top = h.topk(k=4, dim=-1)
        h = torch.cat((top.values, h[..., -4:]), dim=-1).roll(1, -1) @ torch.eye(D, dtype=x.dtype)
        h = (1 - self.c(h)) / (2 + torch.zeros_like(h))
        return self.d(h.reshape(*h.shape[:-1], 2, -1).permute(0, 2, 1).flatten(1))


@odd(*ABCD)
class ToNumpyShape(Net):
    """Sizes are read as numbers and used in new tensors."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        n, d = h.shape
        h = self.b(h + torch.arange(d, dtype=h.dtype) / n)
        eye = h.new_ones(d).diag()
        return self.d(self.c(h @ eye)) * (h.numel() / n / d)


@odd(*ABCD, rounds=1e-6)
class DtypeInside(Net):
    """A part of the glue is in float32."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)).float()
        h = h.softmax(-1).to(x.dtype)
        return self.d(self.c(h))


@odd(*ABCD)
class DefaultDevice(Net):
    """New tensors get their device and dtype from a weight."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.a[0].weight
        h = self.a(x) + torch.ones(D, device=w.device, dtype=w.dtype)
        p = next(self.c.parameters())
        return self.d(self.c(self.b(h).to(p.device, p.dtype)))


@odd(*ABCD)
class TryExcept(Net):
    """The glue tries one way and takes another one if that fails."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        try:
            h = self.b(h.view(-1, 3))
        except RuntimeError:
            h = self.b(h)
        return self.d(self.c(h))


@odd(*ABCD)
class RequiresGradInput(Net):
    """The glue checks whether a gradient is needed, and requires one for the input."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_() if not x.requires_grad else x
        h = self.a(x)
        scale = 2.0 if h.requires_grad else 1.0
        return self.d(self.c(self.b(h * scale)))


@odd(*ABCD)
class Asserts(Net):
    """Checks on values: all are finite, and there are two dims."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        assert torch.isfinite(h).all()
        torch._assert(h.dim() == 2, "two dims")
        return self.d(self.c(h))
