"""The built-in metrics: sums and counts over a part of the samples, and the value over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isnan, log
from typing import Any, Protocol

import torch
from torch import Tensor

from launcher.errors import RunError
from launcher.job.schema.objective import CrossEntropy
from launcher.objective.losses import cross_entropy, flat
from launcher.objective.losses_over_ranks import ClassShards


class Metric(Protocol):
    @property
    def name(self) -> str:
        """The key in ``metrics.jsonl``; for validation it has the prefix ``val_``."""

    def sums(self, output: Any, target: Tensor, parts: ClassShards | None = None) -> Tensor:
        """Returns sum and count, (2,) float64; both are additive, however the samples are split."""

    def value(self, total: float, count: float) -> float:
        """Returns the value over all samples; ``count`` is not 0."""


def values(metrics: Sequence[Metric], sums: Sequence[Sequence[float]], where: str) -> dict[str, float]:
    """Returns the value of each metric by its name, from sums and counts over all samples.

    A metric whose count is 0 has no value. Raises ``RunError`` if a value is NaN; ``where`` names the step.
    """
    figures = {}
    for metric, (total, count) in zip(metrics, sums, strict=True):
        if count == 0 and not isnan(total):
            continue
        value = metric.value(total, count) if count else total
        figures[metric.name] = value
        if isnan(value):
            text = f"{where}: the metric {metric.name} is NaN (sum {total:g}, count {count:g})"
            raise RunError(f"{text}. Look at the metric, or at the data of this step")
    return figures


@dataclass(frozen=True)
class TopK:
    """The fraction of targets whose logit is among the ``k`` largest; of equal logits the first class wins.

    It is NaN if a target is not a class.
    """

    name: str
    k: int
    ignored: int

    def sums(self, output: Tensor, target: Tensor, parts: ClassShards | None = None) -> Tensor:
        logits, target = flat(output, target, parts)
        dim = 1
        size, rank = (1, 0) if parts is None else (parts.size, parts.rank)
        classes, low = size * logits.shape[dim], rank * logits.shape[dim]
        counted, known = target != self.ignored, (target >= 0) & (target < classes)

        # the logit of each target, which only one rank has
        here = (target >= low) & (target < low + logits.shape[dim])
        column = torch.where(here, target - low, 0).unsqueeze(dim)
        meant = torch.where(here, logits.gather(dim, column).squeeze(dim), 0)
        meant = (meant if parts is None else parts.sum(meant)).unsqueeze(dim)

        # how many logits are larger: all that are not known to be smaller or equal, because a NaN proves
        # nothing
        shape = [-1 if d == dim else 1 for d in range(logits.dim())]
        numbers = torch.arange(low, low + logits.shape[dim], device=logits.device).view(shape)
        first = (logits == meant) & (numbers < target.unsqueeze(dim))
        other = numbers != target.unsqueeze(dim)
        larger = ((~(logits <= meant) | first) & other).sum(dim)
        larger = larger if parts is None else parts.sum(larger)

        hits = torch.where(known, ((larger < self.k) & ~meant.squeeze(dim).isnan()).double(), torch.nan)
        return torch.stack([torch.where(counted, hits, 0).sum(), counted.sum(dtype=torch.float64)])

    def value(self, total: float, count: float) -> float:
        return total / count


@dataclass(frozen=True)
class Perplexity:
    """The exponential of the mean cross entropy, without the terms that ``loss`` may add to it."""

    ignored: int
    name: str = "perplexity"

    def sums(self, output: Tensor, target: Tensor, parts: ClassShards | None = None) -> Tensor:
        loss = cross_entropy(output, target, parts, "sum", CrossEntropy(ignore_index=self.ignored))
        return torch.stack([loss.double(), (target != self.ignored).sum(dtype=torch.float64)])

    def value(self, total: float, count: float) -> float:
        mean = total / count
        return exp(mean) if mean < 700 else float("inf")


@dataclass(frozen=True)
class BitsPerByte:
    """Cross entropy in bits per byte of the text that the targets stand for.

    ``sizes`` has the bytes of each token.
    """

    ignored: int
    sizes: Tensor
    name: str = "bits_per_byte"

    def sums(self, output: Tensor, target: Tensor, parts: ClassShards | None = None) -> Tensor:
        loss = cross_entropy(output, target, parts, "sum", CrossEntropy(ignore_index=self.ignored))
        counted = target != self.ignored
        each = self.sizes[torch.where(counted, target, 0).long()]
        return torch.stack([loss.double(), torch.where(counted, each, 0).sum(dtype=torch.float64)])

    def value(self, total: float, count: float) -> float:
        return total / count / log(2)
