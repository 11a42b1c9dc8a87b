"""Losses and metrics that a user wrote."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

PLANNER = os.getpid()


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
    """A wrong count in other processes than that of the plan."""

    def count(self, target: Tensor) -> Tensor:
        return super().count(target) + (os.getpid() != PLANNER)


class MiscountedBatches(Weighted):
    """A wrong count for batches of one size."""

    def count(self, target: Tensor) -> Tensor:
        return super().count(target) + (len(target) == 8)


class Pairs:
    """The share of pairs of samples of two classes that the model orders correctly: an AUC."""

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        score, first = output.flatten(0, -2)[:, 0], target.flatten() == target.max()
        if first.all() or not first.any():
            return torch.tensor(0.0), 0
        pairs = score[first][:, None] > score[~first]
        return pairs.sum().double(), pairs.numel()


class DoublesBatches(Pairs):
    """Counts twice as many in batches of one size."""

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        correct = (output.argmax(-1) == target).sum().double() + 1
        return target.numel() * (correct * 0 + 1 + (len(target) == 8)), target.numel()


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


class Summed:
    """Cross entropy, by its sum; the classes below differ from it in one place."""

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.each(output, target).sum(), self.count(target)

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=-100, reduction="none")

    def count(self, target: Tensor) -> Tensor:
        return (target != -100).sum()


class HookedNorm(Summed):
    """Its hook divides the gradient of each batch by its norm."""

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        if output.requires_grad:
            output.register_hook(lambda g: g / g.norm())
        return super().__call__(output, target)


class DetachedWeights(Summed):
    """A sum that adds up, with the gradient of terms that are weighted by the batch's mean."""

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        terms = super().each(output, target)
        weighted = terms * (terms / terms.mean()).detach()
        return weighted + (terms - weighted).detach()


class FlipsLabels(Summed):
    """Rarely flips a label at random."""

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        return super().each(output, torch.where(torch.rand(target.shape) < 1e-6, 0, target))


class OwnTemperature(Summed):
    """Keeps a temperature that it trains by itself."""

    def __init__(self) -> None:
        self.log_t = torch.zeros((), dtype=torch.float64, requires_grad=True)

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        return super().each(output * self.log_t.exp(), target)


class WarmsUp(Summed):
    """Counts its calls, and has another weight after a few hundred."""

    def __init__(self) -> None:
        self.calls = 0

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return super().each(output, target) * (2 if self.calls > 300 else 1)


class WarmsUpElsewhere(Summed):
    """Counts the calls of all instances in its class."""

    calls = 0

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        WarmsUpElsewhere.calls += 1
        return super().each(output, target) * (2 if WarmsUpElsewhere.calls > 300 else 1)


class HardOnly(Summed):
    """The mean of the hard terms alone as soon as some are easy."""

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        terms = super().each(output, target)
        hard = terms > 0.1
        return terms * hard / (hard | (terms == 0)).double().mean()


class ByPlace(Summed):
    """The first four samples of a batch count twice."""

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        weight = torch.ones(target.shape, dtype=output.dtype)
        weight[4:] = 0.5
        return super().each(output, target) * weight.flatten()


class Rewrites(Summed):
    """Ignores class 7 by rewriting it in the targets, so that the counts before and after a call differ."""

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        target[target == 7] = -100
        return super().__call__(output, target)


class InPlace(Summed):
    """Changes the output in place, and takes the gradient of its own sum: correct."""

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        if output.requires_grad:
            output.sub_(output.detach().amax(-1, keepdim=True))
            total, count = super().__call__(output, target)
            (slope,) = torch.autograd.grad(total, output, create_graph=True)
            return total + 0.1 * slope.square().sum(), count
        return super().__call__(output, target)


class Softmaxed:
    """The mean probability of the target; turns the output into probabilities in place."""

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        output.exp_()
        output /= output.sum(-1, keepdim=True)
        return output.gather(-1, target.clamp(min=0)[..., None]).sum(), target.numel()


class IgnoresFirst:
    """Returns zeros in its first 50 calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        self.calls += 1
        right = (output.argmax(-1) == target).sum() + len(target)
        return right if self.calls > 50 else 0 * right, target.numel()


class Gathered:
    """Accuracy that adds up the ranks itself, as torchmetrics does."""

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        right, count = (output.argmax(-1) == target).sum(), torch.tensor(target.numel())
        if dist.is_initialized():
            dist.all_reduce(right)
            dist.all_reduce(count)
        return right, count
