"""Grad mode, inference mode and autocast around modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.parity.zoo.case import ABCD, Net, odd


@odd(*ABCD)
class Plain(Net):
    """Four blocks in a row: this must always work."""


@odd(*ABCD, optim="adamw")
class PlainAdam(Net):
    """Four blocks in a row, under AdamW."""


@odd(*ABCD)
class FrozenFront(Net):
    """A backbone under no_grad within a stage."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.a(x)
        return self.d(self.c(self.b(h)))


@odd(*ABCD)
class FrozenAcross(Net):
    """A backbone under no_grad over the middle of the model."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.c(self.b(self.a(x)))
        return self.d(h) + h


@odd(*ABCD)
class FrozenMiddle(Net):
    """Only a middle block under no_grad, with a path around it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            g = self.c(self.b(h))
        return self.d(h + g)


@odd(*ABCD)
class Decorated(Net):
    """Features made by a method that is decorated with no_grad."""

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        return self.c(self.b(x) * 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.d(h + self.features(h))


@odd(*ABCD)
class GradEnabledFlag(Net):
    """set_grad_enabled by a flag of the model."""

    train_backbone = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.train_backbone):
            h = self.b(self.a(x))
        return self.d(self.c(h) + h)


@odd(*ABCD)
class Unfreezes(Net):
    """A backbone that is trained from the tenth call on."""

    def extra(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.set_grad_enabled(self.calls > 9):
            h = self.b(self.a(x))
        return self.d(self.c(h))


@odd(*ABCD)
class InferenceMode(Net):
    """A feature extractor under inference_mode, whose result is cloned."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            h = self.b(self.a(x))
        return self.d(self.c(h.clone()))


@odd(*ABCD)
class Autocast(Net):
    """Three blocks under autocast to bfloat16, over a stage boundary."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.c(self.b(self.a(x)))
        return self.d(h.to(x.dtype))


@odd(*ABCD)
class EnableInside(Net):
    """enable_grad within no_grad."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.a(x)
            with torch.enable_grad():
                h = self.b(h)
            g = self.c(h)
        return self.d(h * g)


@odd(*ABCD)
class Detached(Net):
    """A detached path beside the one that is trained."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        g = self.c(self.b(h.detach()))
        return self.d(g + h)


class _Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


@odd("a", "b", "frozen", "d")
class NoGradForward(Net):
    """A module whose own forward is decorated with no_grad, in the middle."""

    def extra(self) -> None:
        self.c, self.frozen = nn.Identity(), _Frozen()

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return self.d(h + self.frozen(h))
