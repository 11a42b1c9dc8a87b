"""Small models in which every operator with a rule is there, with numbers for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.plan.sharding.rules.elementwise import BINARY, UNARY

aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """``run(*modules, *inputs)``."""

    run: Callable[..., Any]
    inputs: Sequence[Tensor]
    modules: Sequence[nn.Module] = ()


class Calls(nn.Module):
    """A module of a function."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.run = case.run
        self.parts = nn.ModuleList(case.modules)

    def forward(self, *inputs: Tensor) -> Any:
        with torch.device(inputs[0].device):
            return self.run(*self.parts, *inputs)


def real(*shape: int) -> Tensor:
    """Numbers around zero, none very near to it nor to another."""
    count = torch.Size(shape).numel()
    spread = torch.randperm(count, generator=torch.Generator().manual_seed(count)).double() - (count - 1) / 2 + 0.1
    return (spread * (1.8 / max(count, 2))).view(shape).requires_grad_()


def positive(*shape: int) -> Tensor:
    """Between 0.05 and 1."""
    return (real(*shape).detach() / 2 + 0.5).clamp(0.05, 0.99).requires_grad_()


def fixed(x: Tensor) -> Tensor:
    return x.detach()


def index(below: int, *shape: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(below + len(shape)))


def module(cls: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """With numbers that are no zeros and ones."""
    made = cls(*args, dtype=torch.float64, **kwargs)
    with torch.no_grad():
        for name, t in (*made.named_parameters(), *made.named_buffers()):
            if t.is_floating_point():
                t.copy_(positive(*t.shape) if "var" in name else real(*t.shape))
    return made


def _unary() -> dict[str, Case]:
    """All that need nothing else, on numbers for which they are defined."""
    with_others = "clamp clamp_max clamp_min clip float_power fill threshold type_as imag to"
    above_one = {"acosh"}
    kinds = [k for k in UNARY.split() if k not in with_others.split() and not k.startswith("_")]
    cases = {}
    for kind in kinds:
        x = positive(12, 4)
        if kind in above_one:
            x = (x.detach() + 1).requires_grad_()
        if kind == "bitwise_not":
            x = index(9, 12, 4)
        cases[kind] = Case(getattr(aten, kind), (x,))
    return cases


def _binary() -> dict[str, Case]:
    """Of two tensors that are broadcast to each other."""
    integer = "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ "
    integer += "__lshift__ __rshift__ gcd lcm"
    cases = {}
    for kind in BINARY.split():
        pair = (positive(12, 1, 4), positive(6, 4))
        if kind in integer.split():
            pair = (index(9, 12, 1, 4), index(5, 6, 4))
        if kind in ("copy", "nextafter", "isclose", "complex", "polar"):
            pair = (positive(12, 4), positive(12, 4))
        if kind in ("nextafter", "floor_divide", "heaviside"):  # without gradients
            pair = (fixed(pair[0]), fixed(pair[1]))
        if kind == "copy":
            cases[kind] = Case(lambda x, y: (x * 1).copy_(y), pair)
            continue
        cases[kind] = Case(getattr(aten, kind), pair)
    return cases


ELEMENTWISE = {
    **_unary(),
    **_binary(),
    "scalars": Case(
        lambda x: (x + 1, 2 - x, x * 3, x / 3, x**2, 2**x, x.clamp(0, 0.5), x.clamp_min(0), x.clamp_max(0.1), x > 0,
                   torch.clip(x, 0, 1), torch.float_power(x, 2), aten.fill(x, 2.0), F.threshold(x, 0.1, 2.0)),
        (real(12, 4),),
    ),
    "floor division": Case(lambda x: x // 2, (fixed(real(12, 4)),)),
    "dtypes": Case(
        lambda x, y: (x.float(), x.to(torch.float16).double(), x.type_as(y), x.to(y), x.half(), x.bool(), x.long(),
                      x.to("cpu"), aten._to_copy(x, dtype=torch.float32), aten._cast_Float(x), aten._cast_Double(x),
                      aten._cast_Half(x)),
        (real(12, 4), fixed(real(12, 4)).float()),
    ),
    "masks": Case(
        lambda x, y: (torch.where(x > 0, x, y), torch.where(x > 0, x, 0.0), x.masked_fill(y > 0, -1.0),
                      x.masked_fill(y > 0, y.sum()), torch.lerp(x, y, 0.3), torch.lerp(x, x + 1, y),
                      torch.addcmul(x, y, x), torch.addcdiv(x, x, y, value=2)),
        (real(12, 6, 4), real(6, 4)),
    ),
    "in place": Case(
        lambda x, m: (x * 1).add_(1).mul_(x).relu_().clamp_(max=3).masked_fill_(m, 1.0).sub_(x, alpha=2).div_(2).tanh_(),
        (real(12, 4), index(2, 12, 4).bool()),
    ),
    "filled in place": Case(lambda x: (x.clone().zero_(), x.clone().fill_(2.0), x.clone().copy_(x.half())), (real(12, 4),)),
    "like": Case(
        lambda x: (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2), torch.empty_like(x).fill_(1.0)),
        (real(12, 4),),
    ),
    "prelu": Case(lambda x, w, one: (F.prelu(x, w), F.prelu(x, one), aten._prelu_kernel(x, w.view(1, 12, 1))),
                  (real(4, 12, 2), positive(12), positive(1))),
    "triangles": Case(lambda x: (x.tril(), x.triu(1), x.tril(-2), x.triu(-3)), (real(2, 12, 6),)),
    "triangle of a square": Case(lambda x: (x.tril(), x.triu(1)), (real(12, 12),)),
    "complex numbers": Case(
        lambda x, a: torch.view_as_real(torch.view_as_complex(x) * torch.polar(torch.ones_like(a), a)).flatten(-2),
        (real(4, 12, 6, 2), real(12, 6)),
    ),
    "parts of complex numbers": Case(lambda x: (torch.view_as_complex(x).real, aten.imag(torch.view_as_complex(x))),
                                     (real(4, 6, 2),)),
}  # fmt: skip

PRODUCTS = {
    "mlp": Case(
        lambda a, b, x: b(F.relu(a(x), inplace=True)), (real(4, 6, 12),),
        (module(nn.Linear, 12, 24), module(nn.Linear, 24, 6, bias=False)),
    ),
    "linear of a vector": Case(lambda w, x: F.linear(x, w), (real(4), real(6, 4))),
    "matmul": Case(lambda a, b: (a @ b, a[:, 0] @ b[0], a[0, 0] @ b, a @ b[0, :, 0]), (real(6, 2, 4, 12), real(2, 12, 6))),
    "bmm": Case(lambda a, b: (torch.bmm(a, b), torch.mm(a[0], b[0]), torch.mv(a[0], b[0, :, 0]), torch.dot(a[0, 0], a[1, 0])),
                (real(4, 6, 12), real(4, 12, 2))),
    "with bias": Case(
        lambda c, a, b: (torch.addmm(c[0], a[0], b[0], beta=2, alpha=3), torch.baddbmm(c, a, b),
                         torch.addmv(c[0, 0], b[0].t(), b[1, :, 1]), torch.addmm(c[0, 0], a[0], b[0])),
        (real(4, 6, 2), real(4, 6, 12), real(4, 12, 2)),
    ),
    "addmm_": Case(lambda c, a, b: (c * 1).addmm_(a, b), (real(6, 2), real(6, 12), real(12, 2))),
    "outer": Case(lambda a, b: (torch.outer(a, b), torch.ger(a, b)), (real(6), real(4))),
    "bilinear": Case(lambda a, b, w, c: (F.bilinear(a, b, w, c), F.bilinear(a, b, w)),
                     (real(6, 4), real(6, 2), real(4, 4, 2), real(4))),
    "tensordot": Case(lambda a, b: torch.tensordot(a, b, dims=([2, 0], [0, 1])), (real(4, 6, 12), real(12, 4, 2))),
    "einsum": Case(
        lambda a, b: (torch.einsum("bsd,btd->bst", a, b), torch.einsum("b s d, b t d", a, b), torch.einsum("...d,...d->...", a, a),
                      torch.einsum("...sd,td->...st", a, b[0]), torch.einsum("bsd->sb", a), torch.einsum("bsd,btd->", a, b)),
        (real(4, 6, 12), real(4, 2, 12)),
    ),
}  # fmt: skip

VIEWS = {
    "reshapes": Case(
        lambda x: (x.reshape(48, 12), x.view(-1), x.flatten(1), x.unflatten(-1, (2, 6)), x.unflatten(2, (6, -1)),
                   x.view(8, 6, 12), x.view(4, 1, 12, 1, 12), x[:, None].squeeze(1), x.view(1, 4, 12, 12).squeeze(),
                   x.view(2, 2, 3, 4, 12), aten._unsafe_view(x, (4, 144)), x.ravel(), x.view_as(x), x.view(48, 12).reshape_as(x),
                   torch.atleast_1d(x), torch.atleast_2d(x), torch.atleast_3d(x), x.view(12, 4, 12)),
        (real(4, 12, 12),),
    ),
    "permutations": Case(
        lambda x: (x.permute(2, 0, 1), x.transpose(0, -1), x.mT, x[0].t(), x.mH, x.adjoint(), x[0].T, x.movedim(0, 2),
                   torch.moveaxis(x, (0, 1), (-1, 0)), x.swapaxes(0, 1), torch.swapdims(x, 1, 2), x.contiguous()),
        (real(4, 6, 12),),
    ),
    "transposed view": Case(lambda x: x.transpose(1, 2).reshape(4, 72).view(4, 6, 12), (real(4, 6, 12),)),
    "expansions": Case(
        lambda x: (x.expand(6, 4, 12), x[:, :1].expand(4, 12), x.broadcast_to(2, 4, 12), x.expand_as(torch.zeros(6, 4, 12)),
                   *torch.broadcast_tensors(x, x[0]), x[:, None].expand(-1, 6, -1)),
        (real(4, 12),),
    ),
    "repetitions": Case(lambda x: (x.repeat(1, 2), x.repeat(3, 1, 1), x.tile(2, 1), x.repeat_interleave(3, 0), x.repeat_interleave(2, -1)),
                        (real(4, 12),)),
    "along a dim": Case(
        lambda x: (x.cumsum(1), x.cumprod(0), *x.cummax(1), *x.cummin(1), x.logcumsumexp(0), *x.topk(2), *x.topk(2, 0),
                   *x.sort(), *torch.sort(x, dim=0, stable=True), *x.sort(0), x.argsort(1), torch.argsort(x, dim=0, stable=True), x.roll(1, 1),
                   x.roll(3), x.roll((1, 2), (0, 2)), x.flip(0), x.flip(0, 2)),
        (real(4, 6, 2),),
    ),
    "pieces": Case(
        lambda x: (x[0], x[:, 1:3], x[..., ::2], x.narrow(1, 0, 2), x.narrow(1, 0, 6), x[:, -1], x[:], x[:, 0:6],
                   x.select(2, 3), *x.unbind(1), *x.split(4, -1), *x.split([5, 7], 2), *x.chunk(3, -1), *x.tensor_split(2, 0)),
        (real(4, 6, 12),),
    ),
    "joined": Case(
        lambda x, y: (torch.cat([x, y], 1), torch.cat([x, x], -1), torch.concat([x, y], 1), torch.concatenate([x, y], 1),
                      torch.stack([x, x], 1), torch.stack([x, x], -1), torch.hstack([x, y]), torch.hstack([x[0, 0], y[0, 0]]),
                      torch.cat([x.new_zeros(0), x])),
        (real(4, 6, 2), real(4, 2, 2)),
    ),
    "padded": Case(lambda x: (F.pad(x, (1, 1)), F.pad(x, (0, 0, 2, 1), value=2.0), F.pad(x, (1, 1), mode="reflect"),
                              aten.constant_pad_nd(x, (0, 1))), (real(4, 6, 6),)),
    "diagonals": Case(lambda x: (x.diagonal(0, 1, 2), x.diagonal(1, -1, 0)), (real(4, 6, 4),)),
    "meshgrid": Case(lambda a, b, c: (*torch.meshgrid(a, b, c, indexing="ij"), *torch.meshgrid(a, b, indexing="xy")),
                     (real(4), real(6), real(2))),
    "channels": Case(lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2), F.unfold(x, 2),
                                F.fold(F.unfold(x, 2), (4, 4), 2)), (real(2, 8, 4, 4),)),
    "made": Case(
        lambda x: (x[0] + torch.zeros(4, 6, dtype=torch.float64), torch.ones(4, 6), torch.full((4, 6), 2.0), torch.empty(4, 6).zero_(),
                   x.new_zeros(4, 6), x.new_ones(6), x.new_full((4,), 3.0), x.new_empty(6).fill_(1.0), torch.arange(6),
                   torch.arange(1, 7, 2), torch.linspace(0, 1, 6), torch.logspace(0, 1, 6), torch.eye(4), torch.tril_indices(4, 4),
                   torch.triu_indices(4, 4), aten.scalar_tensor(2.0), torch.rand(4, 6), torch.randn(4), torch.randint(5, (6,)), torch.randperm(6)),
        (real(2, 4, 6),),
    ),
}  # fmt: skip

REDUCTIONS = {
    "sums": Case(lambda x: (x.sum(), x.mean(), x.sum(1), x.mean((0, 2), keepdim=True), x.sum(-1, keepdim=True), x.mean(-1), x.nansum(0),
                            x.count_nonzero(1), x.count_nonzero(), x.mean(0, dtype=torch.float64)), (real(4, 6, 12),)),
    "others": Case(
        lambda x: (x.amax(1), x.amin((0, 1)), x.argmax(), x.argmax(1), x.argmin(0, keepdim=True), (x > 0).any(), (x > 0).all(1), x.prod(),
                   x.prod(2, keepdim=True), *x.median(1), x.median(), *x.nanmedian(0), *x.mode(1), x.var(), x.var(1), x.var(1, False), x.std(0),
                   *torch.var_mean(x, -1), *torch.std_mean(x, 0, correction=0), x.norm(), torch.linalg.vector_norm(x, 1, dim=1, keepdim=True),
                   *x.kthvalue(2, 0), *torch.aminmax(x, dim=1), *x.max(1), *x.min(0, keepdim=True), x.max(), x.min(), torch.max(x, x * 2),
                   torch.min(x, x[0]), aten.norm(x, 2, [1], False)),
        (real(4, 6, 2),),
    ),
    "norm": Case(lambda x: (x.norm(dim=1), F.normalize(x, dim=-1), F.cosine_similarity(x, x + 1, -1), F.glu(x)), (real(4, 6, 12),)),
    "softmax": Case(
        lambda x: (x.softmax(-1), x.log_softmax(1), F.softmax(x, 0), F.softmin(x, 2), aten._softmax(x, 1, False), aten._log_softmax(x, 2, False),
                   F.softmax(x.float(), 1, dtype=torch.float64), F.log_softmax(x.float(), 1, dtype=torch.float64)),
        (real(4, 6, 12),),
    ),
    "softmax of masked": Case(lambda x, m: x.masked_fill(m, float("-inf")).softmax(-1), (real(6, 12), torch.ones(6, 12).triu(1).bool())),
    "logsumexp": Case(lambda x: (x.logsumexp(1), x.logsumexp((0, 2), keepdim=True), x.logsumexp(-1)), (real(4, 6, 12),)),
    "logsumexp of nothing": Case(lambda x: aten.fill(x, float("-inf")).logsumexp(1), (fixed(real(4, 6)),)),
}  # fmt: skip

NORMS = {
    "layer norm": Case(lambda a, b, x: (a(x), b(x), F.layer_norm(x, (6, 12))), (real(4, 6, 12),),
                       (module(nn.LayerNorm, 12), module(nn.LayerNorm, (6, 12), eps=0.1))),
    "layer norm with weight only": Case(lambda a, x: a(x), (real(4, 12),), (module(nn.LayerNorm, 12, bias=False),)),
    "rms norm": Case(lambda a, x: (a(x), F.rms_norm(x, (6, 12), eps=0.1), F.rms_norm(x * 1e-8, (12,))), (real(4, 6, 12),),
                     (module(nn.RMSNorm, 12),)),
    "batch norm": Case(lambda a, x: a(x), (real(4, 6, 2, 2),), (module(nn.BatchNorm2d, 6),)),
    "batch norm of vectors": Case(lambda a, b, x: (a(x), b(x)), (real(12, 6),),
                                  (module(nn.BatchNorm1d, 6, momentum=0.7), module(nn.BatchNorm1d, 6, affine=False, track_running_stats=False))),
    "batch norm in evaluation": Case(lambda a, x: a(x), (real(4, 6, 2, 2),), (module(nn.BatchNorm2d, 6).eval(),)),
    "group norm": Case(lambda a, x: (a(x), F.group_norm(x, 6)), (real(4, 12, 3),), (module(nn.GroupNorm, 4, 12),)),
    "instance norm": Case(lambda a, b, x: (a(x), b(x), F.instance_norm(x)), (real(4, 6, 5),),
                          (module(nn.InstanceNorm1d, 6, affine=True), module(nn.InstanceNorm1d, 6, track_running_stats=True))),
    "instance norm in evaluation": Case(lambda a, x: a(x), (real(4, 6, 5),), (module(nn.InstanceNorm1d, 6, track_running_stats=True).eval(),)),
}  # fmt: skip


def _heads(x: Tensor) -> Tensor:
    return x.view(4, 6, -1, 4).transpose(1, 2)


ATTENTION = {
    "attention": Case(
        lambda q, k, v, m: (F.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True),
                            F.scaled_dot_product_attention(q, k, v, m), F.scaled_dot_product_attention(q, k, v, m > 0, scale=0.3)),
        (real(4, 6, 12, 4), real(4, 6, 6, 4) * 1.0, real(4, 6, 6, 4) * 0.5, real(6, 12, 6)),
    ),
    "grouped attention": Case(
        lambda q, k, v: (F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
                         F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)),
        (real(2, 12, 6, 4), real(2, 6, 6, 4), real(2, 6, 6, 4)),
    ),
    "written out": Case(
        lambda x: ((_heads(x) @ _heads(x).transpose(-1, -2) / 2).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
                   @ _heads(x)).transpose(1, 2).reshape(4, 6, 8),
        (real(4, 6, 8),),
    ),
}  # fmt: skip

CONVOLUTIONS = {
    "conv1d": Case(lambda a, b, x: b(a(x)), (real(4, 12, 5),), (module(nn.Conv1d, 12, 6, 3), module(nn.ConvTranspose1d, 6, 4, 2))),
    "conv2d": Case(lambda a, b, c, x: c(b(a(x))), (real(4, 6, 5, 5),),
                   (module(nn.Conv2d, 6, 12, 3, padding=1), module(nn.ConvTranspose2d, 12, 6, 2, stride=2),
                    module(nn.Conv2d, 6, 4, 3, padding="same", bias=False))),
    "conv3d": Case(lambda a, b, x: b(a(x)), (real(2, 4, 3, 3, 3),), (module(nn.Conv3d, 4, 6, 2), module(nn.ConvTranspose3d, 6, 2, 2))),
    "groups": Case(lambda a, b, c, x: c(b(a(x))), (real(4, 12, 5),),
                   (module(nn.Conv1d, 12, 24, 3, groups=6), module(nn.Conv1d, 24, 24, 1, groups=24), module(nn.ConvTranspose1d, 24, 12, 2, groups=4))),
    "without batch": Case(lambda a, x: a(x), (real(4, 5),), (module(nn.Conv1d, 4, 6, 3),)),
    "pools of lines": Case(lambda x: (F.max_pool1d(x, 2), F.avg_pool1d(x, 2), F.adaptive_avg_pool1d(x, 2), *F.adaptive_max_pool1d(x, 2, return_indices=True),
                                      *F.max_pool1d(x, 2, return_indices=True), F.interpolate(x, size=4), F.interpolate(x, size=4, mode="linear"),
                                      F.interpolate(x, size=4, mode="nearest-exact")), (real(4, 6, 8),)),
    "pools of images": Case(lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 1), *F.adaptive_max_pool2d(x, 2, return_indices=True),
                                       *F.max_pool2d(x, 2, return_indices=True), F.interpolate(x, scale_factor=2), F.interpolate(x, size=(3, 3), mode="bilinear"),
                                       F.interpolate(x, size=(3, 3), mode="bicubic"), F.interpolate(x, size=(3, 3), mode="nearest-exact"),
                                       F.interpolate(x, size=(3, 3), mode="bilinear", antialias=True), F.interpolate(x, size=(3, 3), mode="bicubic", antialias=True)),
                            (real(4, 6, 4, 4),)),
    "pools of volumes": Case(lambda x: (F.max_pool3d(x, 2), F.avg_pool3d(x, 2), F.adaptive_avg_pool3d(x, 1), *F.adaptive_max_pool3d(x, 2, return_indices=True),
                                        *F.max_pool3d(x, 2, return_indices=True), F.interpolate(x, scale_factor=2), F.interpolate(x, size=(3, 3, 3), mode="trilinear"),
                                        F.interpolate(x, size=(3, 3, 3), mode="nearest-exact")), (real(2, 6, 4, 4, 4),)),
}  # fmt: skip

LOOKUPS = {
    "embedding": Case(lambda a, b, i: (a(i), b(i)), (index(12, 4, 6),),
                      (module(nn.Embedding, 12, 4), module(nn.Embedding, 12, 2, padding_idx=5))),
    "index_select": Case(lambda x, i: (x.index_select(1, i), x.index_select(0, i[:2])), (real(4, 6, 12), index(4, 12))),
    "gather": Case(lambda x, i, j: (x.gather(1, i), x.gather(-1, j), torch.take_along_dim(x, i, 1)), (real(4, 6, 2), index(6, 4, 12, 2), index(2, 4, 2, 4))),
    "indexed": Case(lambda x, i, j: (x[i], x[:, i], x[i, j], x[i, :, j], x[:, i, j[:, None]], x[:, :, i]), (real(12, 6, 6), index(6, 4), index(6, 4))),
    "one_hot": Case(lambda i: F.one_hot(i, 12), (index(12, 4, 6),)),
}  # fmt: skip


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
    "cross entropy of places": Case(_cross_entropies, (real(4, 6, 2), _ignoring(index(6, 4, 2), -100), fixed(positive(6)))),
    "cross entropy of one": Case(lambda x, t: F.cross_entropy(x, t), (real(12), torch.tensor(7))),
    "cross entropy of probabilities": Case(_soft_cross_entropies, (real(6, 12), real(6, 12).softmax(1).detach().requires_grad_(), fixed(positive(12)))),
    "nll": Case(lambda x, t: (aten.nll_loss(x, t), aten.nll_loss2d(x.view(6, 2, 6, 1), t.view(6, 1, 1).expand(6, 6, 1) % 2)), (real(6, 12), index(12, 6))),
    "pointwise": Case(_pointwise, (positive(4, 6), positive(4, 6))),
    "weighted": Case(lambda x, y, w: (F.binary_cross_entropy(x, y, w), F.binary_cross_entropy_with_logits(x, y, w, pos_weight=w),
                                      F.kl_div(x, y, reduction="batchmean"), F.soft_margin_loss(x, y), F.soft_margin_loss(x, y, reduction="none")), (positive(4, 6), fixed(positive(4, 6)), fixed(positive(6)))),
}  # fmt: skip

DROPOUTS = {
    "dropout": Case(
        lambda x: (F.dropout(x, 0.3, True), F.dropout(x, 0.3, False), F.dropout(x, 0.0, True), F.dropout(x, 1.0, True),
                   F.dropout(x * 1, 0.5, True, True)),
        (real(4, 6, 12),),
    ),
}  # fmt: skip

CASES = {
    **ELEMENTWISE, **PRODUCTS, **VIEWS, **REDUCTIONS, **NORMS, **ATTENTION, **CONVOLUTIONS, **LOOKUPS, **LOSSES, **DROPOUTS,
}  # fmt: skip
WITHOUT_RULE = {
    "random": Case(lambda x: (torch.rand_like(x), x.bernoulli(), F.dropout1d(x, 0.5, True)), (positive(4, 6, 2),)),
    "attention with dropout": Case(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), (real(4, 6, 4),)),
}  # fmt: skip
