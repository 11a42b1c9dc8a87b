"""Digests of tensors: a change of one bit, of a sign or of an order changes them; a copy does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from launcher.parallel.digests import digests, weighted_sums

KINDS = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.int64,
    torch.uint8, torch.bool,
)  # fmt: skip
WAYS: dict[str, Callable[[list[Tensor]], Tensor]] = {"hash": digests, "sum": weighted_sums}
"""``hash`` is used on a CPU, and ``sum`` on devices."""


def one_bit(t: Tensor) -> Tensor:
    raw = t.clone().view(torch.uint8)
    raw.view(-1)[-1] ^= 1
    return raw.view(t.dtype)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one bit": one_bit,
    "two rows change places": lambda t: t[[1, 0, *range(2, len(t))]],
    "rows move on": lambda t: t.roll(1, 0),
    "numbers move on": lambda t: t.roll(1, 1),
    "the sign": lambda t: -t,
    "half": lambda t: t * 0.5,
    "a row in another's place": lambda t: t[[1, 1, *range(2, len(t))]],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_number_has_a_digest(kind: torch.dtype, way: Callable[[list[Tensor]], Tensor]) -> None:
    torch.manual_seed(0)
    some = [(torch.randn(shape) * 8).to(kind) for shape in ((), (0,), (7,), (3, 400), (1021,), (2042, 3))]
    assert torch.equal(way(some), way([t.clone() for t in some]))
    assert torch.equal(way([some[3].t().contiguous().t()]), way([some[3]]))
    assert way([some[3]]).item() != way([one_bit(some[3])]).item()
    assert way([some[0]]).item() != way([one_bit(some[0].view(1))]).item()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("columns", [2, 64, 1000, 1020, 1022, 4096])
def test_a_change_changes_it(
    columns: int, change: Callable[[Tensor], Tensor], way: Callable[[list[Tensor]], Tensor]
) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        one = torch.randn(6, columns)
        balanced = torch.cat([one, -one])  # the values sum to zero
        for t in (one, balanced):
            assert way([t]).item() != way([change(t)]).item()
