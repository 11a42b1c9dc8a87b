"""Ranks that run a redistribution get what slicing gives, there and back, by the collectives in the plan."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from launcher.extras.device_matrix.all_to_all_v import Rows, rows_over
from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.redistribution import Redistribution, back, redistribution
from launcher.extras.device_matrix.run.program import StageGroups, redistribute
from launcher.runtime.cluster.world import World
from launcher.testing.meters import CollectiveMeter
from tests.extras.device_matrix.layouts import drawn, drawn_shape
from tests.extras.device_matrix.simulated import region
from tests.ranks import on_ranks
from tests.tiers import ALL

PAIRS = 48 if ALL else 10
"""How many pairs are drawn for each number of ranks, in addition to those of ``KNOWN``."""

MOVED = [torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.int16, torch.complex64]
SUMMED = [torch.float64, torch.float32, torch.bfloat16, torch.int64]

Case = tuple[Redistribution, Redistribution, tuple[int, ...]]
"""The redistribution there, the one back, and the axes over which the gradient comes as terms of a sum."""


def rows_of(plans: Iterable[Redistribution]) -> tuple[Rows, ...]:
    """Return the distinct rows of stage ranks that the plans' collectives need."""
    return tuple(dict.fromkeys(step.rows for plan in plans for step in plan.steps if step.op != "slice"))


def planned(src: TensorLayout, dst: TensorLayout, terms: tuple[int, ...], shape: tuple[int, ...], size: int) -> Case:
    return redistribution(src, dst, shape, size), back(src, dst, terms, shape, size), terms


def cases(ranks: int) -> list[Case]:
    """Return one case of each kind of step, and random ones with tensors that the plan counts as small and as large."""
    whole, rows, columns = (TensorLayout((ranks,), dims) for dims in (((), ()), ((0,), ()), ((), (0,))))
    sums, shape = TensorLayout((ranks,), ((), ()), (0,)), (2 * ranks, ranks)
    found = [
        planned(a, b, (), shape, 4) for a, b in [(rows, columns), (columns, whole), (sums, whole), (sums, columns)]
    ]
    found.append(planned(whole, whole, (0,), shape, 4))
    samples, channels = (TensorLayout((ranks,), (*dims, (), ())) for dims in (((0,), ()), ((), (0,))))
    found.append(planned(samples, channels, (), (2 * ranks, 3 * ranks, 2, 2), 4))
    rng = random.Random(ranks)
    while len(found) < PAIRS + 6:
        dims = rng.randint(1, 3)
        src, dst = drawn(ranks, dims, rng, partial=rng.random() < 0.5), drawn(ranks, dims, rng)
        terms = tuple(a for a in dst.repeated if rng.random() < 0.5)
        found.append(planned(src, dst, terms, drawn_shape([src, dst], rng), rng.choice([4, 1 << 20])))
    return found


def part(whole: torch.Tensor, layout: TensorLayout, rank: int) -> torch.Tensor:
    """Return the part of a rank; a term of a sum is a share that differs by its position."""
    term = TensorLayout(layout.matrix, ()).part(layout.partial, rank)
    count = TensorLayout(layout.matrix, (layout.partial,)).slices[0]
    mine = whole[region(layout, tuple(whole.shape), rank)]
    if count == 1:
        return mine.clone()
    return mine - (count - 1) * 3 if term == 0 else torch.full_like(mine, 3)


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).remainder(101).to(dtype)


def measured(counter: CollectiveMeter, itemsize: int) -> Counter[tuple[str, int]]:
    return Counter({op: (n, counter.nbytes[op] // itemsize) for op, n in counter.count.items()})  # type: ignore[misc]


def in_plan(plan: Redistribution, rank: int) -> dict[str, tuple[int, int]]:
    calls = plan.traffic(rank)
    return {op: (sum(c.op == op for c in calls), sum(c.elements for c in calls if c.op == op))
            for op in {c.op for c in calls}}  # fmt: skip


def rank_there_and_back(world: World, todo: list[Case]) -> list[str]:
    """Return what was wrong: forward and backward in fp64, then forward in other dtypes."""
    wrong = []
    groups = StageGroups.build([tuple(range(world.size))], [rows_of([p for case in todo for p in case[:2]])])
    for number, (there, home, terms) in enumerate(todo):
        src, dst, shape, rank = there.src, there.dst, there.shape, world.rank

        # values and gradients
        whole = numbers(shape, torch.float64)
        x = part(whole, src, rank).requires_grad_()
        kept = x.detach().clone()
        with CollectiveMeter() as forward:
            y = redistribute(x, there, home, groups)
        with CollectiveMeter() as backward:
            y.backward(part(2 * whole, TensorLayout(dst.matrix, dst.dims, terms), rank))
        assert x.grad is not None
        checks = {
            "numbers": torch.equal(y, part(whole, dst, rank)) and torch.equal(x, kept),
            "gradient": torch.equal(x.grad, 2 * whole[region(src, shape, rank)]),
            "contiguous": y.is_contiguous(),
            "collectives there": measured(forward, 8) == in_plan(there, rank),
            "collectives back": measured(backward, 8) == in_plan(home, rank),
        }

        # channels last, as convolutions return them
        if x.dim() == 4:
            last = kept.clone(memory_format=torch.channels_last)
            checks["channels last"] = torch.equal(redistribute(last, there, None, groups), y)

        # moves in any dtype, and sums in the dtypes that gloo can add
        for dtype in SUMMED if src.partial else MOVED:
            moved = redistribute(part(numbers(shape, dtype), src, rank), there, None, groups)
            checks[str(dtype)] = moved.dtype == dtype and torch.equal(moved, part(numbers(shape, dtype), dst, rank))
        wrong += [f"case {number}, {shape}: {src} -> {dst}: {what}" for what, well in checks.items() if not well]
    return wrong


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 12])
def test_ranks_have_what_slicing_gives_by_the_planned_collectives(ranks: int) -> None:
    todo = cases(ranks)
    assert {step.op for case in todo for plan in case[:2] for step in plan.steps} >= {
        "all_gather", "all_to_all", "all_reduce", "reduce_scatter", *(["exchange", "slice"] if ranks > 2 else []),
    }  # fmt: skip
    assert on_ranks(ranks, rank_there_and_back, todo) == [[]] * ranks


def rank_of_two_stages(world: World) -> list[Any]:
    stages, rows = [(0, 2), (1, 3)], TensorLayout((2,), ((0,),))
    gather = redistribution(rows, TensorLayout.replicated(1, 2), (2,))
    groups = StageGroups.build(stages, [rows_of([gather]), [rows_over((2, 1), (0,)), rows_over((2, 1), (1,))]])
    if world.rank in stages[1]:
        x = torch.full((1,), float(world.rank))
        assert groups.all_reduce(x, (2, 1), (1,)) is x, "an axis of one rank has no group"
        return [groups.all_reduce(x.clone(), (2,), (0,), op).tolist() for op in ("sum", "max")]
    return [redistribute(torch.full((1,), float(world.rank)), gather, None, groups).tolist()]


def test_each_stage_has_groups_of_its_own_ranks() -> None:
    assert on_ranks(4, rank_of_two_stages) == [[[0.0, 2.0]], [[4.0], [3.0]]] * 2


def rank_groups(world: World) -> list[Any]:
    rows = [rows_over((2, 2), (0, 1)), rows_over((4,), (0,)), rows_over((2, 2), (1,)), rows_over((2, 2, 1), (1,))]
    made: list[tuple[int, ...]] = []
    new_group = torch.distributed.new_group

    def counted(ranks: list[int]) -> Any:
        made.append(tuple(ranks))
        return new_group(ranks)

    torch.distributed.new_group = counted  # type: ignore[assignment]
    try:
        groups = StageGroups.build([(0, 1, 2, 3)], [rows])
    finally:
        torch.distributed.new_group = new_group
    return [made, groups.of(rows[0])[0] is torch.distributed.group.WORLD, groups.of(rows[2])[1]]


def test_no_group_is_made_twice_nor_the_whole_world_again() -> None:
    pairs = [(0, 1), (2, 3)]
    assert on_ranks(4, rank_groups) == [[pairs, True, pairs[rank // 2]] for rank in range(4)]


def test_a_tensor_that_keeps_its_layout_is_not_copied() -> None:
    whole = TensorLayout.replicated(1, 2)
    stay, reduce = redistribution(whole, whole, (4,)), back(whole, whole, (0,), (4,))
    x = torch.ones(4, requires_grad=True)
    assert redistribute(x, stay, stay, None) is x
    y = redistribute(x, stay, reduce, None)
    assert y is not x
    assert y.data_ptr() == x.data_ptr()


def test_a_redistribution_of_meta_tensors_gives_shapes_without_ranks() -> None:
    rows, columns = TensorLayout((8,), ((0,), ())), TensorLayout((8,), ((), (0,)))
    there, home = redistribution(rows, columns, (16, 8)), back(rows, columns, (), (16, 8))
    x = torch.ones(2, 8, device="meta", requires_grad=True)
    y = redistribute(x, there, home, None)
    y.backward(torch.ones_like(y))
    assert (y.shape, y.device.type) == ((16, 1), "meta")
    assert x.grad is not None
    assert x.grad.shape == (2, 8)
