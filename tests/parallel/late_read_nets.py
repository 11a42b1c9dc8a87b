"""Models whose backward reads a weight that is neither saved for it nor its own module's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Feedback(torch.autograd.Function):
    """Adds to the gradient a product with the weight of a layer, as it is in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] + 0.1 * grads[0] @ ctx.layer.weight.detach(), None


class SavedFeedback(torch.autograd.Function):
    """The same with the weight saved in the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] + 0.1 * grads[0] @ ctx.saved_tensors[0].detach(), None


class ByReference(nn.Module):
    """A layer that reads the weight of a layer in a list."""

    def __init__(self, other: nn.Module | None, dim: int) -> None:
        super().__init__()
        self.net = nn.Linear(dim, dim)
        self.other = [other if other is not None else self.net]

    def forward(self, x: Tensor) -> Tensor:
        return Feedback.apply(torch.tanh(self.net(x)), self.other[0])  # type: ignore[no-untyped-call, no-any-return]


class ByHook(ByReference):
    """The same by a hook of its output."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.net(x)) * 1
        out.register_hook(lambda g: g + 0.1 * g @ self.other[0].weight.detach())
        return out


class ByValue(ByReference):
    """The same with a number of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.net(x)) * 1
        out.register_hook(lambda g: g + 0.1 * g * self.other[0].weight[0, 0].item())
        return out


class ByModuleHook(ByReference):
    """The same by a backward hook of the module."""

    def __init__(self, other: nn.Module | None, dim: int) -> None:
        super().__init__(other, dim)
        self.register_full_backward_hook(lambda m, gi, go: (gi[0] + 0.1 * gi[0] @ self.other[0].weight.detach(),))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.net(x))


class Saves(ByReference):
    """The same with the weight passed and saved."""

    def forward(self, x: Tensor) -> Tensor:
        return SavedFeedback.apply(torch.tanh(self.net(x)), self.net.weight)  # type: ignore[no-untyped-call, no-any-return]


KINDS: dict[str, type[ByReference]] = {
    "function": ByReference, "tensor hook": ByHook, "value": ByValue, "module hook": ByModuleHook, "saved": Saves,
}  # fmt: skip


class LateReads(nn.Module):
    """Four layers; the backward of the second reads the weight of the third (``far``), or its own."""

    def __init__(self, kind: str, far: bool = True, dim: int = 6) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.b = KINDS[kind](self.c if far else None, dim)
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.b(x)
        x = torch.tanh(self.c(x))
        return self.head(x)


class Decays(nn.Module):
    """A layer whose rate decays with its calls."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net, self.rate = nn.Linear(dim, dim), 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.rate *= 0.9
        return torch.tanh(self.net(x))


class Scales(nn.Module):
    """A layer whose gradient is multiplied by the rate of another one."""

    def __init__(self, other: Decays, dim: int) -> None:
        super().__init__()
        self.net, self.other = nn.Linear(dim, dim), [other]

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.net(x)) * 1
        out.register_hook(lambda g: g * self.other[0].rate)
        return out


class Numbers(nn.Module):
    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(dim, dim), Decays(dim)
        self.b = Scales(self.c, dim)
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.b(x)
        x = self.c(x)
        return self.head(x)
