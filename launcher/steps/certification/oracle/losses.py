"""Losses, computed a second time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from launcher.job.schema.components import Loss
from launcher.job.schema.objective import MSE, CrossEntropy
from launcher.job.schema.user_class import Target
from launcher.job.targets import build

HALF = (torch.float16, torch.bfloat16)


class ReferenceObjective:
    """The loss of a full batch is ``summed`` divided by ``counted``."""

    def __init__(self, settings: Loss, allow: tuple[str, ...]) -> None:
        self._settings = settings
        self._own: Any = None
        if isinstance(settings, Target):
            self._own = build(settings, allow, Callable, key="loss._target_")  # type: ignore[arg-type]

    def counted(self, target: Tensor) -> float:
        if isinstance(self._settings, Target):
            return float(self._own.count(target))
        if isinstance(self._settings, CrossEntropy):
            return int((target != self._settings.ignore_index).sum())
        return target.numel()

    def summed(self, output: Any, target: Tensor) -> Tensor:
        """Returns the loss summed over all targets; half-precision outputs are widened first."""
        if not isinstance(output, Tensor):
            several: Tensor = self._of_several(output, target)
            return several
        output = output.float() if output.dtype in HALF else output
        target = target.to(output.dtype) if target.is_floating_point() else target
        if isinstance(self._settings, Target):
            total: Tensor = self._own(output, target)[0]
            return total
        if isinstance(self._settings, CrossEntropy):
            return _of_classes(self._settings, output, target)
        if isinstance(self._settings, MSE):
            squares: Tensor = ((output - target) ** 2).sum()
            return squares
        # -y log s(x) - (1 - y) log(1 - s(x)), and log(1 - s(x)) is log s(-x)
        logs, others = torch.nn.functional.logsigmoid(output), torch.nn.functional.logsigmoid(-output)
        return -(target * logs + (1 - target) * others).sum()

    def _of_several(self, output: Any, target: Tensor) -> Any:
        """Returns the user's loss of a dict or tuple, as the model returns it.

        Targets take its first float dtype.
        """
        pairs = output.items() if isinstance(output, dict) else enumerate(output)
        wide = {key: t.float() if t.dtype in HALF else t for key, t in pairs}
        numbers = [t for t in wide.values() if t.is_floating_point()]
        target = target.to(numbers[0].dtype) if target.is_floating_point() else target
        return self._own(wide if isinstance(output, dict) else tuple(wide.values()), target)[0]


def _of_classes(settings: CrossEntropy, output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy with label smoothing as in arXiv 1512.00567, and a z-loss as in arXiv 2204.02311."""
    if target.shape != output.shape[:-1]:  # as for images: classes come before the positions
        output = output.movedim(1, -1)
    counts = target != settings.ignore_index
    logits, classes = output[counts], target[counts].long()
    z = torch.logsumexp(logits, -1)
    meant = z - logits.gather(-1, classes[:, None])[:, 0]
    every = z - logits.mean(-1)
    share = settings.label_smoothing
    terms = (1 - share) * meant + share * every if share else meant
    if settings.z_loss:
        terms = terms + settings.z_loss * z**2
    return terms.sum()
