"""Attention, convolutions, lookups, losses, dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.extras.device_matrix.run.cases.case import Case, fixed, index, module, positive, real

aten = torch.ops.aten


def _heads(x: Tensor) -> Tensor:
    return x.view(4, 6, -1, 4).transpose(1, 2)


ATTENTION = {
    "attention": Case(
        lambda q, k, v, m: (
            F.scaled_dot_product_attention(q, k, v),
            F.scaled_dot_product_attention(q, k, v, is_causal=True),
            F.scaled_dot_product_attention(q, k, v, m),
            F.scaled_dot_product_attention(q, k, v, m > 0, scale=0.3),
        ),
        (real(4, 6, 12, 4), real(4, 6, 6, 4) * 1.0, real(4, 6, 6, 4) * 0.5, real(6, 12, 6)),
    ),
    "grouped attention": Case(
        lambda q, k, v: (
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
        ),
        (real(2, 12, 6, 4), real(2, 6, 6, 4), real(2, 6, 6, 4)),
    ),
    "written out": Case(
        lambda x: (
            (
                (_heads(x) @ _heads(x).transpose(-1, -2) / 2)
                .masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), float("-inf"))
                .softmax(-1)
                @ _heads(x)
            )
            .transpose(1, 2)
            .reshape(4, 6, 8)
        ),
        (real(4, 6, 8),),
    ),
}

CONVOLUTIONS = {
    "conv1d": Case(
        lambda a, b, x: b(a(x)), (real(4, 12, 5),), (module(nn.Conv1d, 12, 6, 3), module(nn.ConvTranspose1d, 6, 4, 2))
    ),
    "conv2d": Case(
        lambda a, b, c, x: c(b(a(x))),
        (real(4, 6, 5, 5),),
        (
            module(nn.Conv2d, 6, 12, 3, padding=1),
            module(nn.ConvTranspose2d, 12, 6, 2, stride=2),
            module(nn.Conv2d, 6, 4, 3, padding="same", bias=False),
        ),
    ),
    "conv3d": Case(
        lambda a, b, x: b(a(x)),
        (real(2, 4, 3, 3, 3),),
        (module(nn.Conv3d, 4, 6, 2), module(nn.ConvTranspose3d, 6, 2, 2)),
    ),
    "groups": Case(
        lambda a, b, c, x: c(b(a(x))),
        (real(4, 12, 5),),
        (
            module(nn.Conv1d, 12, 24, 3, groups=6),
            module(nn.Conv1d, 24, 24, 1, groups=24),
            module(nn.ConvTranspose1d, 24, 12, 2, groups=4),
        ),
    ),
    "without batch": Case(lambda a, x: a(x), (real(4, 5),), (module(nn.Conv1d, 4, 6, 3),)),
    "pools of lines": Case(
        lambda x: (
            F.max_pool1d(x, 2),
            F.avg_pool1d(x, 2),
            F.adaptive_avg_pool1d(x, 2),
            *F.adaptive_max_pool1d(x, 2, return_indices=True),
            *F.max_pool1d(x, 2, return_indices=True),
            F.interpolate(x, size=4),
            F.interpolate(x, size=4, mode="linear"),
            F.interpolate(x, size=4, mode="nearest-exact"),
        ),
        (real(4, 6, 8),),
    ),
    "pools of images": Case(
        lambda x: (
            F.max_pool2d(x, 2),
            F.avg_pool2d(x, 2),
            F.adaptive_avg_pool2d(x, 1),
            *F.adaptive_max_pool2d(x, 2, return_indices=True),
            *F.max_pool2d(x, 2, return_indices=True),
            F.interpolate(x, scale_factor=2),
            F.interpolate(x, size=(3, 3), mode="bilinear"),
            F.interpolate(x, size=(3, 3), mode="bicubic"),
            F.interpolate(x, size=(3, 3), mode="nearest-exact"),
            F.interpolate(x, size=(3, 3), mode="bilinear", antialias=True),
            F.interpolate(x, size=(3, 3), mode="bicubic", antialias=True),
        ),
        (real(4, 6, 4, 4),),
    ),
    "pools of volumes": Case(
        lambda x: (
            F.max_pool3d(x, 2),
            F.avg_pool3d(x, 2),
            F.adaptive_avg_pool3d(x, 1),
            *F.adaptive_max_pool3d(x, 2, return_indices=True),
            *F.max_pool3d(x, 2, return_indices=True),
            F.interpolate(x, scale_factor=2),
            F.interpolate(x, size=(3, 3, 3), mode="trilinear"),
            F.interpolate(x, size=(3, 3, 3), mode="nearest-exact"),
        ),
        (real(2, 6, 4, 4, 4),),
    ),
}

LOOKUPS = {
    "embedding": Case(
        lambda a, b, i: (a(i), b(i)),
        (index(12, 4, 6),),
        (module(nn.Embedding, 12, 4), module(nn.Embedding, 12, 2, padding_idx=5)),
    ),
    "index_select": Case(lambda x, i: (x.index_select(1, i), x.index_select(0, i[:2])), (real(4, 6, 12), index(4, 12))),
    "gather": Case(
        lambda x, i, j: (x.gather(1, i), x.gather(-1, j), torch.take_along_dim(x, i, 1)),
        (real(4, 6, 2), index(6, 4, 12, 2), index(2, 4, 2, 4)),
    ),
    "indexed": Case(
        lambda x, i, j: (x[i], x[:, i], x[i, j], x[i, :, j], x[:, i, j[:, None]], x[:, :, i]),
        (real(12, 6, 6), index(6, 4), index(6, 4)),
    ),
    "scattered by index": Case(
        lambda x, i, y: (
            x.scatter(1, i, y),
            x.scatter(1, i, 2.0),
            x.scatter_add(1, i, y),
            x.scatter_reduce(1, i, y, "amax"),
            x.index_add(1, i[0, :, 0], y),
            x.index_copy(1, torch.arange(4), y),
            x.index_fill(1, i[0, :, 0], 3.0),
        ),
        (real(4, 6, 2), torch.arange(32).view(4, 4, 2) * 5 % 6, real(4, 4, 2)),
    ),
    "one_hot": Case(lambda i: F.one_hot(i, 12), (index(12, 4, 6),)),
}


def _ignoring(target: Tensor, ignored: int) -> Tensor:
    return target.masked_fill(torch.arange(target.numel()).view(target.shape) % 5 == 1, ignored)


def _cross_entropies(x: Tensor, t: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    made = [F.cross_entropy(x, t)]
    for reduction in ("none", "mean", "sum"):
        made += [
            F.cross_entropy(x, t, w, reduction=reduction),
            F.cross_entropy(x, t, reduction=reduction, label_smoothing=0.1),
            F.cross_entropy(x, t.relu(), w, reduction=reduction, label_smoothing=0.1, ignore_index=3),
            F.nll_loss(x, t, w, reduction=reduction),
            F.nll_loss(x, t.relu(), reduction=reduction, ignore_index=3),
        ]
    return tuple(made)


def _soft_cross_entropies(x: Tensor, p: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return tuple(
        F.cross_entropy(x, p, weight, reduction=reduction, label_smoothing=smoothing)
        for weight in (None, w)
        for reduction in ("none", "mean", "sum")
        for smoothing in (0.0, 0.1)
    )


def _pointwise(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    losses = (
        F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.kl_div,
        F.binary_cross_entropy_with_logits, F.poisson_nll_loss,
    )  # fmt: skip
    return tuple(loss(x, y, reduction=r) for loss in losses for r in ("none", "mean", "sum"))  # type: ignore[operator]


LOSSES = {
    "cross entropy": Case(_cross_entropies, (real(6, 12), _ignoring(index(12, 6), -100), fixed(positive(12)))),
    "cross entropy of places": Case(
        _cross_entropies, (real(4, 6, 2), _ignoring(index(6, 4, 2), -100), fixed(positive(6)))
    ),
    "cross entropy of one": Case(lambda x, t: F.cross_entropy(x, t), (real(12), torch.tensor(7))),
    "cross entropy of probabilities": Case(
        _soft_cross_entropies, (real(6, 12), real(6, 12).softmax(1).detach().requires_grad_(), fixed(positive(12)))
    ),
    "nll": Case(
        lambda x, t: (aten.nll_loss(x, t), aten.nll_loss2d(x.view(6, 2, 6, 1), t.view(6, 1, 1).expand(6, 6, 1) % 2)),
        (real(6, 12), index(12, 6)),
    ),
    "pointwise": Case(_pointwise, (positive(4, 6), positive(4, 6))),
    "weighted": Case(
        lambda x, y, w: (
            F.binary_cross_entropy(x, y, w),
            F.binary_cross_entropy_with_logits(x, y, w, pos_weight=w),
            F.kl_div(x, y, reduction="batchmean"),
            F.soft_margin_loss(x, y),
            F.soft_margin_loss(x, y, reduction="none"),
        ),
        (positive(4, 6), fixed(positive(4, 6)), fixed(positive(6))),
    ),
}

DROPOUTS = {
    "dropout of channels": Case(lambda x: (F.dropout2d(x, 0.3, True), F.dropout2d(x, 0.3, False)), (real(4, 6, 2, 2),)),
    "drawn like": Case(
        lambda x: (
            torch.rand_like(x),
            torch.randn_like(x),
            torch.randint_like(x, 5),
            torch.randint_like(x, 2, 9),
            torch.rand_like(x.mT),
        ),
        (fixed(real(4, 6, 2)),),
    ),
    "dropout with its mask": Case(lambda x: torch.native_dropout(x, 0.3, True), (real(4, 6, 12),)),
    "dropout": Case(
        lambda x: (
            F.dropout(x, 0.3, True),
            F.dropout(x, 0.3, False),
            F.dropout(x, 0.0, True),
            F.dropout(x, 1.0, True),
            F.dropout(x.transpose(0, 2), 0.3, True),
            F.dropout(x[:, :1].expand(4, 6, 12), 0.3, True),
        ),
        (real(4, 6, 12),),
    ),
    "dropout in place": Case(
        lambda x: (F.dropout(x * 1, 0.5, True, True), F.dropout(x.mT * 1, 0.5, True)), (real(4, 6, 12),)
    ),
}
