"""A user-defined loss or metric: called with an output and its targets, it returns a sum and a count."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from launcher.errors import Problem, RequestError, RunError, owned
from launcher.job.schema.components import Target
from launcher.job.schema.objectives import figure
from launcher.job.targets import build
from launcher.objective.cross_entropy import Parts
from launcher.objective.structure import Output, at_least_float32, each, tensors

Pair = tuple[Tensor, Tensor]


class OwnLoss:
    """A user-defined loss.

    ``instance(output, target)`` returns the sum and the count, and ``instance.count(target)`` the count
    alone.
    """

    def __init__(self, settings: Target, allow: tuple[str, ...], device: torch.device) -> None:
        key = "loss._target_"
        self._name = settings.target
        self._made = made(settings, allow, key, device)
        if not callable(getattr(self._made, "count", None)):
            text = f"{self._name}: it has no method count(target), and the mean over a global batch divides"
            text += " by what its targets count before any forward is done"
            raise RequestError((Problem(key, text),))
        self._apart: Tensor | None = None

    def __call__(self, output: Output, target: Tensor, parts: Parts | None = None) -> Tensor:
        assert parts is None, "the planner does not shard outputs for a loss of your own"
        total, count = self.pair(output, target)

        # different counts make the loss NaN, because a check would wait for the GPU
        apart = (count - self.count(target)).abs()
        self._apart = apart if self._apart is None else self._apart + apart
        return torch.where(apart == 0, total, torch.nan)

    def pair(self, output: Output, target: Tensor) -> Pair:
        """Return the sum and the count of the user's instance.

        Raises ``RunError`` if it returns anything else.
        """
        return pair(self._made, output, target, self._name)

    def count(self, target: Tensor) -> Tensor:
        return number(self._made.count(target), f"{self._name}.count(target)", target)

    def problem(self) -> str:
        if self._apart is None or not self._apart.item():
            return ""
        return f"{self._name}: it returns another count than its count(target)"


class OwnMetric:
    def __init__(self, settings: Target, allow: tuple[str, ...], device: torch.device) -> None:
        self.name = figure(settings)
        self._target = settings.target
        self._made = made(settings, allow, "metrics", device)

    def sums(self, output: Output, target: Tensor, parts: Parts | None = None) -> Tensor:
        assert parts is None, "the planner does not shard outputs for a metric of your own"
        total, count = self.pair(output, target)
        return torch.stack([total.double(), count])

    def pair(self, output: Output, target: Tensor) -> Pair:
        """Return the sum and the count, as ``OwnLoss.pair`` does."""
        return pair(self._made, output, target, self._target)

    def value(self, total: float, count: float) -> float:
        return total / count


def made(settings: Target, allow: tuple[str, ...], key: str, device: torch.device) -> Any:
    """Build an instance; the buffers of a module are moved to ``device``. Raises ``RequestError``."""
    with owned(key, f"{settings.target}: cannot be built"):
        instance: Any = build(settings, allow, Callable, key=key)  # type: ignore[arg-type]
    if not isinstance(instance, nn.Module):
        return instance
    if any(True for _ in instance.parameters()):
        text = f"{settings.target}: it has parameters that would not be trained; move them into the model"
        raise RequestError((Problem(key, text),))
    return instance.to(device)


def pair(call: Callable[[Output, Tensor], object], output: Output, target: Tensor, name: str) -> Pair:
    """Return the sum and the count that ``call`` returns, 0-d. Raises ``RunError`` if they are anything else.

    ``call`` gets outputs in float32 at least, and floating-point targets in the same dtype.
    """
    wide = each(output, at_least_float32)
    near = next(t for t in tensors(wide) if t.is_floating_point())
    found = call(wide, target.to(near.dtype) if target.is_floating_point() else target)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise RunError(f"{name}: it gives {type(found).__name__} where a sum and a count were expected")
    total, count = found
    if isinstance(total, Real):
        total = torch.tensor(float(total), dtype=torch.float64, device=near.device)
    if not isinstance(total, Tensor) or total.dim():
        raise RunError(f"{name}: its sum is {_kind(total)} where one number was expected; add up all samples")
    return total, number(count, f"the count of {name}", near)


def number(found: object, what: str, near: Tensor) -> Tensor:
    """Return ``found`` as 0-d float64 on the device of ``near``.

    Raises ``RunError``; ``what`` names the value.
    """
    if isinstance(found, Tensor) and not found.dim():
        return found.detach().to(near.device, torch.float64)
    if isinstance(found, Real):
        return torch.tensor(float(found), dtype=torch.float64, device=near.device)
    raise RunError(f"{what} is {_kind(found)} where one number was expected")


def _kind(found: object) -> str:
    return f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
