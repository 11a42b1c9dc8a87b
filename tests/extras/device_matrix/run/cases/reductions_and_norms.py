"""Sums, softmax, norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.extras.device_matrix.run.cases.case import Case, fixed, module, real

aten = torch.ops.aten

REDUCTIONS = {
    "sums": Case(
        lambda x: (
            x.sum(),
            x.mean(),
            x.sum(1),
            x.mean((0, 2), keepdim=True),
            x.sum(-1, keepdim=True),
            x.mean(-1),
            x.nansum(0),
            x.count_nonzero(1),
            x.count_nonzero(),
            x.mean(0, dtype=torch.float64),
        ),
        (real(4, 6, 12),),
    ),
    "others": Case(
        lambda x: (
            x.amax(1),
            x.amin((0, 1)),
            x.argmax(),
            x.argmax(1),
            x.argmin(0, keepdim=True),
            (x > 0).any(),
            (x > 0).all(1),
            x.prod(),
            x.prod(2, keepdim=True),
            *x.median(1),
            x.median(),
            *x.nanmedian(0),
            *x.mode(1),
            x.var(),
            x.var(1),
            x.var(1, False),
            x.std(0),
            *torch.var_mean(x, -1),
            *torch.std_mean(x, 0, correction=0),
            x.norm(),
            torch.linalg.vector_norm(x, 1, dim=1, keepdim=True),
            *x.kthvalue(2, 0),
            *torch.aminmax(x, dim=1),
            *x.max(1),
            *x.min(0, keepdim=True),
            x.max(),
            x.min(),
            torch.max(x, x * 2),
            torch.min(x, x[0]),
            aten.norm(x, 2, [1], False),
        ),
        (real(4, 6, 2),),
    ),
    "norm": Case(
        lambda x: (x.norm(dim=1), F.normalize(x, dim=-1), F.cosine_similarity(x, x + 1, -1), F.glu(x)),
        (real(4, 6, 12),),
    ),
    "softmax": Case(
        lambda x: (
            x.softmax(-1),
            x.log_softmax(1),
            F.softmax(x, 0),
            F.softmin(x, 2),
            aten._softmax(x, 1, False),
            aten._log_softmax(x, 2, False),
            F.softmax(x.float(), 1, dtype=torch.float64),
            F.log_softmax(x.float(), 1, dtype=torch.float64),
        ),
        (real(4, 6, 12),),
    ),
    "softmax of masked": Case(
        lambda x, m: x.masked_fill(m, float("-inf")).softmax(-1), (real(6, 12), torch.ones(6, 12).triu(1).bool())
    ),
    "logsumexp": Case(
        lambda x: (x.logsumexp(1), x.logsumexp((0, 2), keepdim=True), x.logsumexp(-1)), (real(4, 6, 12),)
    ),
    "logsumexp of nothing": Case(lambda x: aten.fill(x, float("-inf")).logsumexp(1), (fixed(real(4, 6)),)),
}

NORMS = {
    "layer norm": Case(
        lambda a, b, x: (a(x), b(x), F.layer_norm(x, (6, 12))),
        (real(4, 6, 12),),
        (module(nn.LayerNorm, 12), module(nn.LayerNorm, (6, 12), eps=0.1)),
    ),
    "layer norm with weight only": Case(lambda a, x: a(x), (real(4, 12),), (module(nn.LayerNorm, 12, bias=False),)),
    "rms norm": Case(
        lambda a, x: (a(x), F.rms_norm(x, (6, 12), eps=0.1), F.rms_norm(x * 1e-8, (12,))),
        (real(4, 6, 12),),
        (module(nn.RMSNorm, 12),),
    ),
    "batch norm": Case(lambda a, x: a(x), (real(4, 6, 2, 2),), (module(nn.BatchNorm2d, 6),)),
    "batch norm of vectors": Case(
        lambda a, b, x: (a(x), b(x)),
        (real(12, 6),),
        (module(nn.BatchNorm1d, 6, momentum=0.7), module(nn.BatchNorm1d, 6, affine=False, track_running_stats=False)),
    ),
    "batch norm in evaluation": Case(lambda a, x: a(x), (real(4, 6, 2, 2),), (module(nn.BatchNorm2d, 6).eval(),)),
    "group norm": Case(lambda a, x: (a(x), F.group_norm(x, 6)), (real(4, 12, 3),), (module(nn.GroupNorm, 4, 12),)),
    "instance norm": Case(
        lambda a, x: (a(x), F.instance_norm(x)),
        (real(4, 6, 5),),
        (module(nn.InstanceNorm1d, 6, affine=True),),
    ),
    "instance norm in evaluation": Case(
        lambda a, x: a(x), (real(4, 6, 5),), (module(nn.InstanceNorm1d, 6, track_running_stats=True).eval(),)
    ),
}
