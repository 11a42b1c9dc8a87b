"""Normalization of values and of weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

from tests.parity.zoo.case import ABCD, D, Net, block, image, odd


@odd("a", "n", "c", "d")
class BatchNorm(Net):
    """Batch norm with running statistics."""

    def extra(self) -> None:
        self.n = nn.BatchNorm1d(D)
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.n(self.a(x))))


@odd("a", "n", "c", "d")
class BatchNormCumulative(BatchNorm):
    """Batch norm with a cumulative average (momentum None) and without weights."""

    def extra(self) -> None:
        self.n = nn.BatchNorm1d(D, momentum=None, affine=False)
        del self.b


@odd("a", "n", "c", "d")
class BatchNormUntracked(BatchNorm):
    """Batch norm without running statistics."""

    def extra(self) -> None:
        self.n = nn.BatchNorm1d(D, track_running_stats=False)
        del self.b


@odd("a", "n", "c", "d")
class BatchNormFrozen(BatchNorm):
    """Batch norm kept in evaluation mode by an overridden train()."""

    def train(self, mode: bool = True) -> BatchNormFrozen:
        super().train(mode)
        self.n.eval()
        return self


@odd("a", "n", "c", "d")
class SyncBatchNorm(BatchNorm):
    """SyncBatchNorm, which communicates with other ranks itself."""

    def extra(self) -> None:
        self.n = nn.SyncBatchNorm(D)
        del self.b


@image("conv", "group", "instance", "head")
class GroupAndInstance(nn.Module):
    """Group norm, and instance norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, D, 3, padding=1)
        self.group, self.instance = nn.GroupNorm(2, D), nn.InstanceNorm2d(D, affine=True, track_running_stats=True)
        self.head = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.instance(self.group(self.conv(x)).tanh()).square().mean((-2, -1)))


@odd(*ABCD)
class WeightNorm(Net):
    """The old weight norm, by a pre-forward hook."""

    def extra(self) -> None:
        self.b, self.d = weight_norm(nn.Linear(D, D)), weight_norm(nn.Linear(D, D), dim=None)


@odd(*ABCD)
class WeightNormNew(Net):
    """Weight norm as a parametrization."""

    def extra(self) -> None:
        self.b = nn.Sequential(parametrizations.weight_norm(nn.Linear(D, D)), nn.Tanh())


@odd(*ABCD)
class SpectralNorm(Net):
    """Spectral norm, whose power iteration changes buffers."""

    def extra(self) -> None:
        self.c = nn.Sequential(spectral_norm(nn.Linear(D, D)), nn.Tanh())


@odd(*ABCD)
class SpectralNormNew(Net):
    """Spectral norm as a parametrization."""

    def extra(self) -> None:
        self.c = nn.Sequential(parametrizations.spectral_norm(nn.Linear(D, D)), nn.Tanh())


class _Skew(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu(1) - w.triu(1).mT


@odd(*ABCD)
class SkewWeights(Net):
    """A parametrization that the user wrote."""

    def extra(self) -> None:
        self.b = nn.Linear(D, D)
        parametrize.register_parametrization(self.b, "weight", _Skew())


@odd(*ABCD)
class Orthogonal(Net):
    """Orthogonal weights by matrix_exp."""

    def extra(self) -> None:
        self.b = parametrizations.orthogonal(nn.Linear(D, D), orthogonal_map="matrix_exp", use_trivialization=False)


class _Standardized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean(1, keepdim=True)
        return nn.functional.linear(x, w / (w.std(1, keepdim=True) + 1e-5), self.bias)


@odd(*ABCD)
class WeightStandardized(Net):
    """Weights are standardized in the forward."""

    def extra(self) -> None:
        self.b = _Standardized(D, D)


@odd("a", "n", "c", "d")
class NormInGlue(Net):
    """The glue calls torch's batch norm function with a module's statistics."""

    def extra(self) -> None:
        self.n, self.b = nn.BatchNorm1d(D), block()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = nn.functional.batch_norm(h, self.n.running_mean, self.n.running_var, self.n.weight, self.n.bias, True)
        return self.d(self.c(h))


@odd(*ABCD)
class RmsNormByHand(Net):
    """RMS norm in the glue, with a root parameter used on two stages."""

    def extra(self) -> None:
        self.gain = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = self.b(h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * self.gain)
        h = self.c(h)
        return self.d(h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * self.gain)
