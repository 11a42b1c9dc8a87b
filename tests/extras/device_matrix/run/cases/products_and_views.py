"""Matrix products, and operators that move elements."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.extras.device_matrix.run.cases.case import Case, module, real

aten = torch.ops.aten

PRODUCTS = {
    "mlp": Case(
        lambda a, b, x: b(F.relu(a(x), inplace=True)),
        (real(4, 6, 12),),
        (module(nn.Linear, 12, 24), module(nn.Linear, 24, 6, bias=False)),
    ),
    "linear of a vector": Case(lambda w, x: F.linear(x, w), (real(4), real(6, 4))),
    "matmul": Case(
        lambda a, b: (a @ b, a[:, 0] @ b[0], a[0, 0] @ b, a @ b[0, :, 0]), (real(6, 2, 4, 12), real(2, 12, 6))
    ),
    "bmm": Case(
        lambda a, b: (torch.bmm(a, b), torch.mm(a[0], b[0]), torch.mv(a[0], b[0, :, 0]), torch.dot(a[0, 0], a[1, 0])),
        (real(4, 6, 12), real(4, 12, 2)),
    ),
    "with bias": Case(
        lambda c, a, b: (
            torch.addmm(c[0], a[0], b[0], beta=2, alpha=3),
            torch.baddbmm(c, a, b),
            torch.addmv(c[0, 0], b[0].t(), b[1, :, 1]),
            torch.addmm(c[0, 0], a[0], b[0]),
        ),
        (real(4, 6, 2), real(4, 6, 12), real(4, 12, 2)),
    ),
    "addmm_": Case(lambda c, a, b: (c * 1).addmm_(a, b), (real(6, 2), real(6, 12), real(12, 2))),
    "outer": Case(lambda a, b: (torch.outer(a, b), torch.ger(a, b)), (real(6), real(4))),
    "bilinear": Case(
        lambda a, b, w, c: (F.bilinear(a, b, w, c), F.bilinear(a, b, w)),
        (real(6, 4), real(6, 2), real(4, 4, 2), real(4)),
    ),
    "tensordot": Case(lambda a, b: torch.tensordot(a, b, dims=([2, 0], [0, 1])), (real(4, 6, 12), real(12, 4, 2))),
    "einsum": Case(
        lambda a, b: (
            torch.einsum("bsd,btd->bst", a, b),
            torch.einsum("b s d, b t d", a, b),
            torch.einsum("...d,...d->...", a, a),
            torch.einsum("...sd,td->...st", a, b[0]),
            torch.einsum("bsd->sb", a),
            torch.einsum("bsd,btd->", a, b),
        ),
        (real(4, 6, 12), real(4, 2, 12)),
    ),
}

VIEWS = {
    "reshapes": Case(
        lambda x: (
            x.reshape(48, 12),
            x.view(-1),
            x.flatten(1),
            x.unflatten(-1, (2, 6)),
            x.unflatten(2, (6, -1)),
            x.view(8, 6, 12),
            x.view(4, 1, 12, 1, 12),
            x[:, None].squeeze(1),
            x.view(1, 4, 12, 12).squeeze(),
            x.view(2, 2, 3, 4, 12),
            aten._unsafe_view(x, (4, 144)),
            x.ravel(),
            x.view_as(x),
            x.view(48, 12).reshape_as(x),
            torch.atleast_1d(x),
            torch.atleast_2d(x),
            torch.atleast_3d(x),
            x.view(12, 4, 12),
        ),
        (real(4, 12, 12),),
    ),
    "permutations": Case(
        lambda x: (
            x.permute(2, 0, 1),
            x.transpose(0, -1),
            x.mT,
            x[0].t(),
            x.mH,
            x.adjoint(),
            x[0].T,
            x.movedim(0, 2),
            torch.moveaxis(x, (0, 1), (-1, 0)),
            x.swapaxes(0, 1),
            torch.swapdims(x, 1, 2),
            x.contiguous(),
        ),
        (real(4, 6, 12),),
    ),
    "transposed view": Case(lambda x: x.transpose(1, 2).reshape(4, 72).view(4, 6, 12), (real(4, 6, 12),)),
    "expansions": Case(
        lambda x: (
            x.expand(6, 4, 12),
            x[:, :1].expand(4, 12),
            x.broadcast_to(2, 4, 12),
            x.expand_as(torch.zeros(6, 4, 12)),
            *torch.broadcast_tensors(x, x[0]),
            x[:, None].expand(-1, 6, -1),
        ),
        (real(4, 12),),
    ),
    "repetitions": Case(
        lambda x: (
            x.repeat(1, 2),
            x.repeat(3, 1, 1),
            x.tile(2, 1),
            x.repeat_interleave(3, 0),
            x.repeat_interleave(2, -1),
        ),
        (real(4, 12),),
    ),
    "along a dim": Case(
        lambda x: (
            x.cumsum(1),
            x.cumprod(0),
            *x.cummax(1),
            *x.cummin(1),
            x.logcumsumexp(0),
            *x.topk(2),
            *x.topk(2, 0),
            *x.sort(),
            *torch.sort(x, dim=0, stable=True),
            *x.sort(0),
            x.argsort(1),
            torch.argsort(x, dim=0, stable=True),
            x.roll(1, 1),
            x.roll(3),
            x.roll((1, 2), (0, 2)),
            x.flip(0),
            x.flip(0, 2),
        ),
        (real(4, 6, 2),),
    ),
    "pieces": Case(
        lambda x: (
            x[0],
            x[:, 1:3],
            x[..., ::2],
            x.narrow(1, 0, 2),
            x.narrow(1, 0, 6),
            x[:, -1],
            x[:],
            x[:, 0:6],
            x.select(2, 3),
            *x.unbind(1),
            *x.split(4, -1),
            *x.split([5, 7], 2),
            *x.chunk(3, -1),
            *x.tensor_split(2, 0),
        ),
        (real(4, 6, 12),),
    ),
    "joined": Case(
        lambda x, y: (
            torch.cat([x, y], 1),
            torch.cat([x, x], -1),
            torch.concat([x, y], 1),
            torch.concatenate([x, y], 1),
            torch.stack([x, x], 1),
            torch.stack([x, x], -1),
            torch.hstack([x, y]),
            torch.hstack([x[0, 0], y[0, 0]]),
            torch.cat([x.new_zeros(0), x]),
        ),
        (real(4, 6, 2), real(4, 2, 2)),
    ),
    "padded": Case(
        lambda x: (
            F.pad(x, (1, 1)),
            F.pad(x, (0, 0, 2, 1), value=2.0),
            F.pad(x, (1, 1), mode="reflect"),
            aten.constant_pad_nd(x, (0, 1)),
        ),
        (real(4, 6, 6),),
    ),
    "windows": Case(lambda x: x.unfold(1, 3, 2), (real(4, 7, 6),)),
    "diagonals": Case(lambda x: (x.diagonal(0, 1, 2), x.diagonal(1, -1, 0)), (real(4, 6, 4),)),
    "scattered": Case(
        lambda x, y: (
            torch.slice_scatter(x, y, 1, 2, 4),
            torch.select_scatter(x, y[:, 0], 1, 3),
        ),
        (real(4, 6, 2), real(4, 2, 2)),
    ),
    "meshgrid": Case(
        lambda a, b, c: (*torch.meshgrid(a, b, c, indexing="ij"), *torch.meshgrid(a, b, indexing="xy")),
        (real(4), real(6), real(2)),
    ),
    "channels": Case(
        lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2), F.unfold(x, 2), F.fold(F.unfold(x, 2), (4, 4), 2)),
        (real(2, 8, 4, 4),),
    ),
    "made": Case(
        lambda x: (
            x[0] + torch.zeros(4, 6, dtype=torch.float64),
            torch.ones(4, 6),
            torch.full((4, 6), 2.0),
            torch.empty(4, 6).zero_(),
            x.new_zeros(4, 6),
            x.new_ones(6),
            x.new_full((4,), 3.0),
            x.new_empty(6).fill_(1.0),
            torch.arange(6),
            torch.arange(1, 7, 2),
            torch.linspace(0, 1, 6),
            torch.logspace(0, 1, 6),
            torch.eye(4),
            torch.tril_indices(4, 4),
            torch.triu_indices(4, 4),
            aten.scalar_tensor(2.0),
            torch.rand(4, 6),
            torch.randn(4),
            torch.randint(5, (6,)),
            torch.randperm(6),
        ),
        (real(2, 4, 6),),
    ),
}
