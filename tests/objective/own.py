"""Losses and metrics that a user wrote."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Weighted:
    """Cross entropy in which class c has the weight 1 + c / 10, and -100 has none."""

    def __init__(self, step: float = 0.1) -> None:
        self.step = step

    def weights(self, target: Tensor) -> Tensor:
        return torch.where(target == -100, 0, 1 + target.clamp(min=0).double() * self.step)

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        each = F.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=-100, reduction="none")
        weights = self.weights(target)
        return (each * weights.flatten()).sum(), weights.sum()

    def count(self, target: Tensor) -> Tensor:
        return self.weights(target).sum()


class MeanOfMeans(Weighted):
    """A loss that does not add up: each part of a batch is divided by a number that depends on the part."""

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total, count = super().__call__(output, target)
        return total / count.clamp(min=1), count


class Miscounted(Weighted):
    def count(self, target: Tensor) -> Tensor:
        return super().count(target) + 1


class LaterMiscounted(Weighted):
    """A wrong count for batches that are larger than those with which a plan tries the loss."""

    def count(self, target: Tensor) -> Tensor:
        return super().count(target) + (len(target) > 4)


class Uncounted:
    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return output.sum(), target.numel()


class Detached(Weighted):
    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return super().__call__(output.detach(), target)


class Rowwise(Weighted):
    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return output.sum(-1), self.count(target)


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class AbsError:
    """The mean absolute error over all elements."""

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return (output - target).abs().sum(), target.numel()


class Holes:
    """The share of targets that are -100; for a batch of ``nan_from`` samples it is NaN."""

    def __init__(self, nan_from: int | None = None) -> None:
        self.nan_from = nan_from

    def __call__(self, output: Tensor, target: Tensor) -> tuple[float, int]:
        found = float((target == -100).sum())
        return float("nan") if self.nan_from == len(target) else found, target.numel()


class Largest:
    """A metric that does not add up."""

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return output.max(), 1


class Narrow(Weighted):
    """A loss that computes in float32 whatever the dtype of its input is, as those of language models do."""

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return super().__call__(output.float(), target)


class OfOneDtype(Weighted):
    """A loss with a constant of one dtype, which torch multiplies with no other dtype."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.turn = torch.eye(64, dtype=getattr(torch, dtype))

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return super().__call__(output @ self.turn, target)


class NarrowMean(OfOneDtype):
    """A loss of one dtype that does not add up."""

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total, count = super().__call__(output, target)
        return total / count.clamp(min=1), count


class Rounded(Narrow):
    """Adds a share of its sum that depends on the size of the batch, and rounds to ``dtype``."""

    def __init__(self, dtype: str, share: float) -> None:
        super().__init__()
        self.dtype, self.share = getattr(torch, dtype), share

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total, count = super().__call__(output, target)
        return (total * (1 + self.share / len(output))).to(self.dtype), count


class Miscounts(Narrow):
    """Counts a little more for each call, and rounds its sum to half the bits."""

    def count(self, target: Tensor) -> Tensor:
        return super().count(target) + 0.01

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return super().__call__(output, target)[0].half(), self.count(target)


class Float32Weights(Narrow):
    """Class weights in float32, as in most losses: the sum of the weights is rounded too."""

    def weights(self, target: Tensor) -> Tensor:
        return super().weights(target).float()
