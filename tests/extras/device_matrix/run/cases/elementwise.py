"""Elementwise operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from launcher.extras.device_matrix.rules.elementwise import BINARY, UNARY
from tests.extras.device_matrix.run.cases.case import Case, fixed, index, positive, real

aten = torch.ops.aten


WITH_ARGUMENTS = {
    "clamp",
    "clamp_max",
    "clamp_min",
    "clip",
    "float_power",
    "fill",
    "threshold",
    "type_as",
    "imag",
    "to",
}
ABOVE_ONE = {"acosh"}
OF_INTEGERS = {
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "bitwise_not",
    "__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "gcd", "lcm",
}  # fmt: skip
WITHOUT_GRADIENT = {"nextafter", "floor_divide", "heaviside"}
OF_ONE_SHAPE = {"nextafter", "isclose", "complex", "polar"}
NUMBERS = [kind for kind in UNARY.split() if kind not in {*WITH_ARGUMENTS, *ABOVE_ONE, *OF_INTEGERS} and kind[0] != "_"]
PAIRS = [kind for kind in BINARY.split() if kind not in {*OF_INTEGERS, *WITHOUT_GRADIENT, *OF_ONE_SHAPE, "copy"}]


def _each(kinds: Iterable[str]) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function that calls all of these operators on the same tensors."""
    ops = [getattr(aten, kind) for kind in kinds]
    return lambda *tensors: tuple(op(*tensors) for op in ops)


ELEMENTWISE = {
    "numbers": Case(_each(NUMBERS), (positive(12, 4),)),
    "numbers above one": Case(_each(sorted(ABOVE_ONE)), ((positive(12, 4).detach() + 1).requires_grad_(),)),
    "broadcast pairs": Case(_each(PAIRS), (positive(12, 1, 4), positive(6, 4))),
    "pairs of one shape": Case(_each(sorted(OF_ONE_SHAPE - WITHOUT_GRADIENT)), (positive(12, 4), positive(12, 4))),
    "pairs without gradient": Case(_each(sorted(WITHOUT_GRADIENT)), (fixed(positive(12, 4)), fixed(real(12, 4)))),
    "bits": Case(_each(sorted(OF_INTEGERS - {"bitwise_not"})), (index(9, 12, 1, 4), index(5, 6, 4))),
    "bits of one": Case(torch.bitwise_not, (index(9, 12, 4),)),
    "copied": Case(lambda x, y: (x * 1).copy_(y), (positive(12, 4), positive(12, 4))),
    "scalars": Case(
        lambda x: (
            x + 1,
            2 - x,
            x * 3,
            x / 3,
            x**2,
            2**x,
            x.clamp(0, 0.5),
            x.clamp_min(0),
            x.clamp_max(0.1),
            x > 0,
            torch.clip(x, 0, 1),
            torch.float_power(x, 2),
            aten.fill(x, 2.0),
            F.threshold(x, 0.1, 2.0),
        ),
        (real(12, 4),),
    ),
    "floor division": Case(lambda x: x // 2, (fixed(real(12, 4)),)),
    "dtypes": Case(
        lambda x, y: (
            x.float(),
            x.to(torch.float16).double(),
            x.type_as(y),
            x.to(y),
            x.half(),
            x.bool(),
            x.long(),
            x.to("cpu"),
            aten._to_copy(x, dtype=torch.float32),
            aten._cast_Float(x),
            aten._cast_Double(x),
            aten._cast_Half(x),
        ),
        (real(12, 4), fixed(real(12, 4)).float()),
    ),
    "masks": Case(
        lambda x, y: (
            torch.where(x > 0, x, y),
            torch.where(x > 0, x, 0.0),
            x.masked_fill(y > 0, -1.0),
            x.masked_fill(y > 0, y.sum()),
            torch.lerp(x, y, 0.3),
            torch.lerp(x, x + 1, y),
            torch.addcmul(x, y, x),
            torch.addcdiv(x, x, y, value=2),
        ),
        (real(12, 6, 4), real(6, 4)),
    ),
    "in place": Case(
        lambda x, m: (
            (x * 1).add_(1).mul_(x).relu_().clamp_(max=3).masked_fill_(m, 1.0).sub_(x, alpha=2).div_(2).tanh_()
        ),
        (real(12, 4), index(2, 12, 4).bool()),
    ),
    "filled in place": Case(
        lambda x: (x.clone().zero_(), x.clone().fill_(2.0), x.clone().copy_(x.half())), (real(12, 4),)
    ),
    "like": Case(
        lambda x: (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2), torch.empty_like(x).fill_(1.0)),
        (real(12, 4),),
    ),
    "prelu": Case(
        lambda x, w, one: (F.prelu(x, w), F.prelu(x, one), aten._prelu_kernel(x, w.view(1, 12, 1))),
        (real(4, 12, 2), positive(12), positive(1)),
    ),
    "triangles": Case(lambda x: (x.tril(), x.triu(1), x.tril(-2), x.triu(-3)), (real(2, 12, 6),)),
    "triangle of a square": Case(lambda x: (x.tril(), x.triu(1)), (real(12, 12),)),
    "complex numbers": Case(
        lambda x, a: torch.view_as_real(torch.view_as_complex(x) * torch.polar(torch.ones_like(a), a)).flatten(-2),
        (real(4, 12, 6, 2), real(12, 6)),
    ),
    "parts of complex numbers": Case(
        lambda x: (torch.view_as_complex(x).real, aten.imag(torch.view_as_complex(x))), (real(4, 6, 2),)
    ),
}
