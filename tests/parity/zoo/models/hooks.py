"""Hooks: on the root, on modules, on tensors, on parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.parity.zoo.case import ABCD, D, Net, odd


@odd(*ABCD)
class RootHook(Net):
    """A forward hook on the root doubles the logits."""

    def extra(self) -> None:
        self.register_forward_hook(lambda module, args, out: out * 2)


@odd(*ABCD)
class RootPreHook(Net):
    """A pre-forward hook on the root shifts the input."""

    def extra(self) -> None:
        self.register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))


@odd(*ABCD)
class RootBackwardHook(Net):
    """A full backward hook on the root that only counts."""

    def extra(self) -> None:
        self.seen = 0
        self.register_full_backward_hook(self._look)

    def _look(self, module: nn.Module, before: Any, after: Any) -> None:
        self.seen += 1


@odd(*ABCD)
class InnerHooks(Net):
    """Forward and pre-forward hooks on inner modules change values."""

    def extra(self) -> None:
        self.b.register_forward_hook(lambda module, args, out: out + 0.1)
        self.c.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        self.a[0].register_forward_hook(lambda module, args, out: out.clamp(-1, 1))


@odd(*ABCD)
class InnerBackwardHook(Net):
    """A full backward hook on an inner module scales its input gradient."""

    def extra(self) -> None:
        self.c.register_full_backward_hook(lambda module, before, after: tuple(g * 0.5 for g in before))


@odd(*ABCD)
class TensorHook(Net):
    """Hooks on tensors of the glue change gradients."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.register_hook(lambda g: g * 0.25)
        h = self.b(h)
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-0.001, 0.001))
        return self.d(self.c(h))


@odd(*ABCD)
class ParameterHook(Net):
    """A hook on a weight halves its gradient."""

    def extra(self) -> None:
        self.b[0].weight.register_hook(lambda g: g * 0.5)


@odd(*ABCD)
class MaskedGradient(Net):
    """A hook on a weight masks the gradient of half of its rows, as for new tokens of an embedding."""

    def extra(self) -> None:
        self.d.weight.register_hook(self._mask)

    @staticmethod
    def _mask(g: Tensor) -> Tensor:
        g = g.clone()
        g[:4] = 0
        return g


@odd(*ABCD)
class PostAccumulateHook(Net):
    """A hook after accumulation clamps the gradient so far."""

    def extra(self) -> None:
        self.c[0].weight.register_post_accumulate_grad_hook(self._clamp)

    @staticmethod
    def _clamp(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.clamp_(-1e-3, 1e-3)


@odd(*ABCD)
class HookKeepsActivation(Net):
    """A hook keeps an inner activation on the model, which the glue uses later."""

    def extra(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self.a[0].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.kept["a"] = out

    def forward(self, x: Tensor) -> Tensor:
        h = self.c(self.b(self.a(x)))
        return self.d(h + self.kept["a"])


@odd(*ABCD, "other")
class GradientSurgery(Net):
    """A hook keeps the gradient of one path for the hook of another, as gradient surgery between tasks does."""

    def extra(self) -> None:
        self.other = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        one, two = h.clone(), h.clone()
        kept: dict[str, Tensor] = {}

        def project(grad: Tensor) -> Tensor:
            before = kept.get("grad", grad)
            return grad - 0.5 * (grad * before).sum(1, keepdim=True) * before

        if h.requires_grad:
            one.register_hook(lambda grad: kept.update(grad=grad))
            two.register_hook(project)
        return self.d(self.c(two)) + self.other(one)  # type: ignore[no-any-return]
