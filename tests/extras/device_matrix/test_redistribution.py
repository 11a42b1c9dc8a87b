"""A redistribution gives every rank the slice of the full tensor, at no more than the cheapest known cost."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.extras.device_matrix.all_to_all_v import received
from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.redistribution import LATENCY, Redistribution, back, redistribution
from tests.extras.device_matrix.exhaustive_chains import cheapest_chain
from tests.extras.device_matrix.layouts import drawn, drawn_shape
from tests.extras.device_matrix.simulated import carried_out, parts_of, received_in, region

RANKS = st.sampled_from([2, 4, 6, 8, 12])
ITEMSIZE = st.sampled_from([1, 4, 1 << 12, 1 << 20])
"""The last two stand for large tensors, whose bytes cost more than the start of collectives."""


def pair_of(ranks: int, rng: random.Random, most_dims: int = 3) -> tuple[TensorLayout, TensorLayout, tuple[int, ...]]:
    dims = rng.randint(1, most_dims)
    src, dst = drawn(ranks, dims, rng, partial=rng.random() < 0.5), drawn(ranks, dims, rng)
    return src, dst, drawn_shape([src, dst], rng)


def ops(plan: Redistribution) -> list[str]:
    return [step.op for step in plan.steps]


@given(ranks=RANKS, rng=st.randoms(use_true_random=False), itemsize=ITEMSIZE)
def test_any_layout_to_any_other_equals_slicing_the_whole_tensor(ranks: int, rng: random.Random, itemsize: int) -> None:
    src, dst, shape = pair_of(ranks, rng)
    whole = np.arange(math.prod(shape)).reshape(shape)
    plan = redistribution(src, dst, shape, itemsize)
    moved = carried_out(plan, parts_of(whole, src))
    for rank, part in enumerate(moved):
        np.testing.assert_array_equal(part, whole[region(dst, shape, rank)])
    for step, after in zip(plan.steps, plan.steps[1:], strict=False):
        assert step.after == after.before
    assert all(step.after.divides(shape) for step in plan.steps)


@given(ranks=RANKS, rng=st.randoms(use_true_random=False), itemsize=ITEMSIZE)
def test_a_gradient_in_terms_comes_back_whole_to_every_place_it_came_from(
    ranks: int, rng: random.Random, itemsize: int
) -> None:
    src, dst, shape = pair_of(ranks, rng)
    terms = tuple(a for a in dst.repeated if rng.random() < 0.5)
    whole = np.arange(math.prod(shape)).reshape(shape)
    given_back = parts_of(whole, TensorLayout(dst.matrix, dst.dims, terms))
    for rank, part in enumerate(carried_out(back(src, dst, terms, shape, itemsize), given_back)):
        np.testing.assert_array_equal(part, whole[region(src, shape, rank)])


@given(ranks=st.sampled_from([2, 4, 6, 8, 12, 16]), rng=st.randoms(use_true_random=False), itemsize=ITEMSIZE)
def test_no_chain_of_one_axis_a_step_costs_less(ranks: int, rng: random.Random, itemsize: int) -> None:
    src, dst, shape = pair_of(ranks, rng, most_dims=2)
    plan, chain = redistribution(src, dst, shape, itemsize), cheapest_chain(src, dst, shape, itemsize, LATENCY)
    if chain is not None:
        assert plan.cost(itemsize) <= chain


@given(ranks=RANKS, rng=st.randoms(use_true_random=False), itemsize=ITEMSIZE)
def test_no_sum_followed_by_one_exchange_costs_less(ranks: int, rng: random.Random, itemsize: int) -> None:
    src, dst, shape = pair_of(ranks, rng)
    lacks = received(src.summed(), dst, shape)
    direct = lacks * itemsize + (LATENCY if lacks else 0)
    n = math.prod(src.matrix[a] for a in src.partial)
    if n > 1:
        direct += -(-2 * (n - 1) * math.prod(src.local_shape(shape)) // n) * itemsize + LATENCY
    assert redistribution(src, dst, shape, itemsize).cost(itemsize) <= direct


@given(ranks=st.sampled_from([2, 4, 6, 8, 12, 16, 24]), rng=st.randoms(use_true_random=False))
def test_an_exchange_receives_what_is_lacking_and_sends_hardly_more(ranks: int, rng: random.Random) -> None:
    src, dst, shape = pair_of(ranks, rng)
    for step in redistribution(src.summed(), dst, shape).steps:
        if step.op == "exchange":
            sent, largest = [0] * ranks, 0
            for row in step.rows:
                for piece in step.exchange.pieces:
                    if piece.sender != piece.receiver:
                        sent[row[piece.sender]] += piece.elements
                        largest = max(largest, piece.elements)
            busiest = max(received_in(step))
            assert busiest == step.elements == max(
                math.prod(dst.local_shape(shape)) - overlap(src, dst, shape, rank) for rank in range(ranks)
            )  # fmt: skip
            assert max(sent) < busiest + largest


def overlap(src: TensorLayout, dst: TensorLayout, shape: tuple[int, ...], rank: int) -> int:
    pairs = zip(region(src, shape, rank), region(dst, shape, rank), strict=True)
    return math.prod(max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a, b in pairs)


ROWS_8 = TensorLayout((8,), ((0,), ()))
ROWS_2 = TensorLayout((2, 4), ((0,), ()))
COLUMNS_8 = TensorLayout((8,), ((), (0,)))
BLOCKS_8 = TensorLayout((2, 4), ((0,), (1,)))
WHOLE_8 = TensorLayout.replicated(2, 8)


@pytest.mark.parametrize(
    ("src", "dst", "steps", "elements"),
    [
        pytest.param(ROWS_8, TensorLayout((2, 4), ((0, 1), ())), [], 0, id="the same in other words"),
        pytest.param(WHOLE_8, ROWS_8, ["slice"], 0, id="slice"),
        pytest.param(ROWS_8, WHOLE_8, ["all_gather"], 7 * 512, id="all-gather"),
        pytest.param(ROWS_8, COLUMNS_8, ["all_to_all"], 7 * 64, id="all-to-all"),
        pytest.param(TensorLayout((8,), ((), ()), (0,)), WHOLE_8, ["all_reduce"], 7168, id="all-reduce"),
        pytest.param(TensorLayout((8,), ((), ()), (0,)), ROWS_8, ["reduce_scatter"], 3584, id="reduce-scatter"),
        pytest.param(TensorLayout((2, 4), ((0,), ()), (1,)), ROWS_8, ["reduce_scatter"], 1536, id="over an axis"),
        pytest.param(ROWS_8, TensorLayout((2, 4), ((1, 0), ())), ["exchange"], 512, id="strided"),
        pytest.param(BLOCKS_8, ROWS_8, ["all_to_all"], 384, id="one axis over"),
        pytest.param(ROWS_2, TensorLayout((2, 4), ((), (1, 0))), ["slice", "all_to_all"], 256, id="slice first"),
    ],
)
def test_the_step_that_everybody_knows_is_found(
    src: TensorLayout, dst: TensorLayout, steps: list[str], elements: int
) -> None:
    plan = redistribution(src, dst, (64, 64))
    assert (ops(plan), plan.elements) == (steps, elements)
    assert plan.collectives == sum(op != "slice" for op in steps)


def test_device_matrices_without_a_common_refinement_take_one_exchange() -> None:
    src, dst = TensorLayout((3, 4), ((0,), (1,))), TensorLayout((4, 3), ((0,), (1,)))
    plan = redistribution(src, dst, (12, 12))
    assert (ops(plan), plan.elements) == (["exchange"], 12)
    assert plan.steps[0].rows == (tuple(range(12)),)


def test_a_rank_keeps_what_it_has_and_the_others_share_the_sending() -> None:
    """Blocks are transposed: the rank at (i, j) has block i and needs block j, which only row j has."""
    src, dst = TensorLayout((3, 3), ((0,),)), TensorLayout((3, 3), ((1,),))
    (step,) = redistribution(src, dst, (3,)).steps
    pieces = {(p.sender, p.receiver) for p in step.exchange.pieces}
    assert {(0, 0), (4, 4), (8, 8)} <= pieces
    busy = [sender for sender, receiver in pieces if sender != receiver]
    assert len(busy) == len(set(busy)) == 6


def test_an_exchange_is_among_the_ranks_that_have_something_for_each_other() -> None:
    """Both layouts split dim 0 by the outer axis first, and repeat over the inner one."""
    src, dst = TensorLayout((2, 2, 2, 3), ((0, 1, 2), ())), TensorLayout((2, 2, 2, 3), ((0, 2, 1), ()))
    (step,) = redistribution(src, dst, (8, 1)).steps
    assert step.op == "exchange"
    assert step.rows == tuple((a + b, a + b + 3, a + b + 6, a + b + 9) for a in (0, 12) for b in range(3))


def test_large_sums_are_shared_among_ranks_that_would_all_do_the_same() -> None:
    src, shape = TensorLayout((4, 2), ((), ()), (0,)), (1 << 14, 1 << 14)
    plan = redistribution(src, WHOLE_8, shape)
    assert ops(plan) == ["slice", "all_reduce", "all_gather"]
    assert plan.elements == (1 << 28) * 5 // 4
    assert ops(redistribution(src, WHOLE_8, (8, 8))) == ["all_reduce"]


def test_sums_are_scattered_in_the_order_that_leaves_least_to_gather() -> None:
    """Both axes of terms are summed at once; the axis that the target layout splits comes first."""
    src, dst = TensorLayout((2, 2, 2), ((), ()), (0, 1)), TensorLayout((2, 2, 2), ((0,), ()))
    plan = redistribution(src, dst, (1 << 14, 1 << 14))
    assert (plan.collectives, plan.elements) == (2, (1 << 28) * 3 // 4)


def test_hand_written_tensor_parallelism_needs_nothing_but_its_two_sums() -> None:
    """A linear layer by columns, then one by rows: one all-reduce ends the forward, and one ends the backward."""
    whole, columns = TensorLayout.replicated(2, 4), TensorLayout((4,), ((), (0,)))
    terms = TensorLayout((4,), ((), ()), (0,))
    assert redistribution(whole, whole, (8, 8)).steps == ()
    assert ops(back(whole, whole, (0,), (8, 8))) == ["all_reduce"]
    assert redistribution(columns, columns, (8, 32)).steps == ()
    assert back(columns, columns, (), (8, 32)).steps == ()
    assert ops(redistribution(terms, whole, (8, 8))) == ["all_reduce"]
    assert back(terms, whole, (), (8, 8)).steps == ()


@pytest.mark.parametrize("shape", [(), (1,), (0, 4)], ids=str)
def test_tensors_of_one_number_or_none_are_only_summed(shape: tuple[int, ...]) -> None:
    src, dst = TensorLayout((2, 2), ((),) * len(shape), (0,)), TensorLayout.replicated(len(shape), 4)
    assert redistribution(src, src, shape).steps == ()
    (step,) = redistribution(src, dst, shape).steps
    assert step.op == "all_reduce"
    assert step.rows == ((0, 2), (1, 3))


def test_plans_of_huge_stages_do_not_look_at_pairs_of_ranks() -> None:
    """16,384 ranks have 268 million pairs."""
    shape = (1 << 15, 1 << 15)
    src, dst = TensorLayout((128, 128), ((0, 1), ())), TensorLayout((128, 128), ((1,), (0,)))
    plan = redistribution(src, dst, shape)
    assert (ops(plan), plan.elements) == (["exchange"], 1 << 16)
    sums = TensorLayout((64, 4, 64), ((0,), (1,)), (2,))
    assert redistribution(sums, dst, shape).elements == (1 << 22) * 63 // 64 + (1 << 16)


def test_a_plan_has_a_price_in_bytes_and_starts() -> None:
    plan = redistribution(ROWS_8, COLUMNS_8, (64, 64))
    assert plan.cost(itemsize=2) == 7 * 64 * 2 + LATENCY
    assert [(c.op, c.elements, c.ranks) for c in plan.traffic(rank=3)] == [("all_to_all", 512, 8)]
