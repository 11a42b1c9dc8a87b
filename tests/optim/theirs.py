"""Optimizers as users write them: textbook ones, and ones with a feature that a layout or a checkpoint can break."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

Params = Iterable[nn.Parameter]


class Base(torch.optim.Optimizer):
    """A base class whose ``update`` returns what is added to a parameter."""

    def __init__(self, params: Params, lr: float = 0.01, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.update(p, p.grad, group))


class Lion(Base):
    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        m = self.state[p].setdefault("m", torch.zeros_like(p))
        way = m.lerp(g, 0.1).sign()
        m.lerp_(g, 0.01)
        return -group["lr"] * (way + 0.1 * p)


class IntStep(Base):
    """Adam with an int, a float, a flag, a list and None in its state."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        if not state:
            state |= {"step": 0, "power": 1.0, "even": True, "last": [0.0, (0, None)], "none": None}
            state |= {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
        state["step"] += 1
        state["power"] *= 0.9
        state["even"] = not state["even"]
        state["last"] = [state["power"] / 3, (state["step"] * 2, None)]
        state["m"].mul_(0.9).add_(g, alpha=0.1)
        state["v"].mul_(0.99).addcmul_(g, g, value=0.01)
        m = state["m"] / (1 - state["power"])
        v = state["v"] / (1 - 0.99 ** (state["last"][1][0] // 2))
        return -group["lr"] * (2.0 if state["even"] else 1.0) * m / (v.sqrt() + 1e-6)


class CounterInGroup(Base):
    """A warm-up that the optimizer itself counts in its group."""

    def __init__(self, params: Params, lr: float = 0.01) -> None:
        super().__init__(params, lr, k=0, seen=torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["seen"] = group["seen"] + 0.5
            group["late"] = group.get("late", 1.0) * 0.9
        super().step()

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        return -group["lr"] * min(1.0, group["k"] / 6) * group["late"] * g / (1 + group["seen"])


class Swapped(Base):
    """SGD that replaces the parameter's tensor with a new one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


class Rare(Base):
    """Uses an operation for which DTensor has no rule."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        return -group["lr"] * torch.special.expit(torch.nextafter(g, torch.zeros_like(g))) * g


class TensorRate(Base):
    """Its rate is a tensor, which is also an attribute."""

    def __init__(self, params: Params, lr: float = 0.01) -> None:
        super().__init__(params)
        self.rate = torch.tensor(lr, dtype=torch.float64)
        self.param_groups[0]["lr"] = self.rate

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        return -self.rate * g


class Lookahead(Base):
    """Its slow weights are created at the third step."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        fast = p - group["lr"] * g
        if state["step"] == 3:
            state["slow"] = fast.clone()
        if state["step"] % 4 == 0:
            fast = state["slow"].lerp_(fast, 0.5).clone()
        return fast - p


class LARS(Base):
    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        ratio = 0.1 * p.norm() / (g.norm() + 1e-12) if p.norm() > 0 else 1.0
        m = self.state[p].setdefault("m", torch.zeros_like(p))
        m.mul_(0.9).add_(g * ratio)
        return -group["lr"] * m


class LAMB(Base):
    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        m, v = state.setdefault("m", torch.zeros_like(p)), state.setdefault("v", torch.zeros_like(p))
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.99).addcmul_(g, g, value=0.01)
        way = m / (v.sqrt() + 1e-6)
        w = p.norm().item()
        return -group["lr"] * (w / way.norm().item() if w else 1.0) * way


class Factored(Base):
    """Second moments of rows and columns, and of every number of a vector."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        state, square = self.state[p], g.square() + 1e-30
        if p.ndim < 2:
            v = state.setdefault("v", torch.zeros_like(p)).lerp_(square, 0.1)
        else:
            rows = state.setdefault("rows", p.new_zeros(p.shape[:-1])).lerp_(square.mean(-1), 0.1)
            columns = state.setdefault("columns", p.new_zeros(p.shape[-1])).lerp_(square.flatten(0, -2).mean(0), 0.1)
            v = rows[..., None] * columns / rows.mean()
        return -group["lr"] * g / v.sqrt()


class RowWise(Base):
    """One second moment per row: shards of full rows are correct, other shards are not."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        v = self.state[p].setdefault("v", torch.zeros_like(p))
        square = g.square()
        v.lerp_(square.mean(-1, keepdim=True).expand_as(g) if g.ndim > 1 else square, 0.1)
        return -group["lr"] * g / (v.sqrt() + 1e-8)


class Shampoo(Base):
    """For matrices, uses the inverse roots of both Gram matrices."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        if p.ndim != 2:
            return -group["lr"] * g
        state = self.state[p]
        left = state.setdefault("left", 1e-4 * torch.eye(p.shape[0], dtype=p.dtype)).add_(g @ g.T)
        right = state.setdefault("right", 1e-4 * torch.eye(p.shape[1], dtype=p.dtype)).add_(g.T @ g)
        return -group["lr"] * root(left) @ g @ root(right)


def root(a: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(a)
    return vectors * values.clamp_min(1e-12).pow(-0.25) @ vectors.T


class GlobalNorm(Base):
    """SGD that clips by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        ps = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in ps))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * min(1.0, 0.01 / norm))


class Skips(Base):
    """Skips a step if the norm of all gradients is far larger than before."""

    def __init__(self, params: Params, lr: float = 0.01) -> None:
        super().__init__(params, lr, usual=0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norm = math.sqrt(sum(p.grad.square().sum().item() for p in group["params"]))
            if norm < 10 * group["usual"] or not group["usual"]:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["lr"])
            group["usual"] = 0.9 * group["usual"] + 0.1 * norm


class Clipped(Base):
    """Clips each tensor by its own norm, which happens rarely."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        return -group["lr"] * g * min(1.0, 1e4 / g.norm().item())


class Prodigy(Base):
    """Computes its distance ``d`` from sums over all parameters, and keeps it in its group."""

    def __init__(self, params: Params, lr: float = 1.0) -> None:
        super().__init__(params, lr, d=1e-3, numerator=0.0, k=0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        ps = [p for p in group["params"] if p.grad is not None]
        for p in ps:
            state = self.state[p]
            if not state:
                state |= {"start": p.clone(), "s": torch.zeros_like(p)}
            group["numerator"] += group["d"] * torch.sum(p.grad * (state["start"] - p)).item()
            state["s"].add_(p.grad, alpha=group["d"])
        total = sum(self.state[p]["s"].abs().sum().item() for p in ps)
        group["d"] = max(group["d"], 1e3 * group["numerator"] / total)  # within a few steps, for a test
        group["k"] += 1
        for p in ps:
            p.sub_(p.grad, alpha=group["lr"] * group["d"] / math.sqrt(group["k"]))


class Noise(Base):
    """Langevin dynamics."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        return -group["lr"] * (g + 0.01 * torch.randn_like(p))


class PythonNoise(Base):
    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        return -group["lr"] * g * (1 + 0.1 * random.random())


class ById(Base):
    """Keeps momentum in a dict by the ids of parameters."""

    def __init__(self, params: Params, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.momenta: dict[int, Tensor] = {}

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        return -group["lr"] * self.momenta.setdefault(id(p), torch.zeros_like(p)).mul_(0.9).add_(g)


class TextInState(Base):
    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        self.state[p]["mode"] = "warm"
        return -group["lr"] * g


class GlobalState(Base):
    """Keeps a counter under a key that is not a parameter."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        count = self.state["all"]["n"] = self.state["all"].get("n", 0) + 1
        return -group["lr"] * g / count


class OwnRate(Base):
    """Lowers its own rate."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        group["lr"] *= 0.99
        return -group["lr"] * g


class NoRate(torch.optim.Optimizer):
    def __init__(self, params: Params) -> None:
        super().__init__(params, {})


class ScheduleFree(Base):
    def train(self) -> None: ...

    def eval(self) -> None: ...


class SAM(Base):
    """Sharpness-aware: takes the gradient twice."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "SAM requires a closure"


class Grouped(Base):
    """Needs groups with a key of its own."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        assert all(isinstance(g, dict) and "use_muon" in g for g in params), "groups with use_muon are needed"
        super().__init__(params, lr)


class Idle(Base):
    """Updates parameters in backward hooks and not in its step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class Flat(Base):
    """Updates each number by itself, with a state of another shape."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        both = self.state[p].setdefault("both", p.new_zeros((2, *p.shape)))
        both[0].mul_(0.9).add_(g)
        both[1] += 1
        return -group["lr"] * both[0] / both[1]


class Strict(Base):
    """Fails on a parameter without a gradient, and on one without elements."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                assert p.numel(), "no elements"
                p.sub_(group["lr"] * p.grad / max(1.0, 0.0 * p.grad.abs().amax().item()))


class SinglePrecision(Base):
    """Fails for any dtype but fp32, as a kernel of one dtype does."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        assert p.dtype is torch.float32, "fp32 only"
        return -group["lr"] * g


class Scale(nn.Module):
    """One number: if two ranks shard it, one of them has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Net(nn.Module):
    """A layer whose rows two ranks cannot share evenly; ``matrices``: all parameters are matrices."""

    def __init__(self, matrices: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=not matrices)
        self.second = nn.Linear(8, 8, bias=not matrices)
        self.scale = nn.Identity() if matrices else Scale()
        self.head = nn.Linear(8, 3, bias=not matrices)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.scale(torch.tanh(self.second(torch.tanh(self.first(x))))))
        return out


class Spare(Net):
    """A net with a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class Scaled(Base):
    """Scales each weight's update by its attribute ``scale``; ``early``: the constructor reads it too."""

    def __init__(self, params: Params, lr: float = 0.01, early: bool = False) -> None:
        params = list(params)
        super().__init__([p for p in params if hasattr(p, "scale")] or params if early else params, lr)

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        return g * (-group["lr"] * getattr(p, "scale", 1.0))


class Freezes(Base):
    """Freezes vectors after two steps."""

    def __init__(self, params: Params, lr: float = 0.01) -> None:
        super().__init__(params, lr, k=0)

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        group["k"] += 1
        p.requires_grad_(p.ndim > 1 or group["k"] < 20)
        return -group["lr"] * g


class FreezesLate(Base):
    """Freezes vectors after some hundred steps; counts the updates of all tensors."""

    def __init__(self, params: Params, lr: float = 0.01) -> None:
        super().__init__(params, lr, k=0)

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        group["k"] += 1
        p.requires_grad_(p.ndim > 1 or group["k"] < 900)
        return -group["lr"] * g


class LateNorm(Base):
    """Plain SGD for 30 steps, then divided by the norm of all gradients."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        step = self.state[p]["step"] = self.state[p].get("step", 0) + 1
        norm = math.sqrt(sum(q.grad.square().sum().item() for q in group["params"])) if step > 30 else 1.0
        return -group["lr"] * g / norm


class LateNoise(Base):
    """Draws random numbers after 500 steps, which its state counts in a tensor."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        step = self.state[p]["step"] = self.state[p].get("step", torch.zeros(())) + 1
        return -group["lr"] * (g + torch.randn_like(g) if step > 500 else g)


class SeldomSlow(Base):
    """Lookahead every 30 steps; count and slow weights are attributes of the object."""

    def __init__(self, params: Params, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.k, self.slow = 0, [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.k += 1
        if self.k % 30 == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                p.copy_(slow.lerp_(p, 0.5))

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        return -group["lr"] * g


class CountsInClass(Base):
    """Counts its steps in a variable of its class; the count matters after thousands."""

    steps = 0

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        CountsInClass.steps += 1
        return -group["lr"] * g * (1.0 if CountsInClass.steps < 100_000 else 0.1)


class ClampsByHook(Base):
    def __init__(self, params: Params, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        for p in self.param_groups[0]["params"]:
            p.register_hook(lambda g: g.clamp(-0.1, 0.1))

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        return -group["lr"] * g


class OldZeroGrad(Base):
    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        return -group["lr"] * g


class Averages(Base):
    """Averages gradients over the ranks itself."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(g)
        return -group["lr"] * g


class FlatBuffer(Base):
    """Makes all parameters views of one buffer, and updates the buffer alone."""

    def __init__(self, params: Params, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        ps = self.param_groups[0]["params"]
        self.flat = torch.cat([p.detach().flatten() for p in ps])
        for p, part in zip(ps, self.flat.split([p.numel() for p in ps]), strict=True):
            p.data = part.view_as(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        self.flat.sub_(torch.cat([p.grad.flatten() for p in group["params"]]), alpha=group["lr"])
