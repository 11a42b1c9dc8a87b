"""Pieces of a sequence: of equal length, or of equal cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.cut.sequence_chunks import balanced, equal
from launcher.plan.schedule import schedules
from launcher.plan.schedule.simulate import Cost, simulate


@given(st.integers(1, 400), st.integers(1, 12), st.floats(0, 10), st.floats(0, 1))
def test_balanced_pieces_are_whole_none_is_empty_and_no_other_cut_of_equal_lengths_is_better(
    length: int, count: int, linear: float, quadratic: float
) -> None:
    count = min(count, length)
    linear += 0.01
    cut = balanced(length, count, linear, quadratic)
    assert (sum(cut), len(cut), min(cut) > 0) == (length, count, True)

    def dearest(pieces: tuple[int, ...]) -> float:
        ends = [sum(pieces[: n + 1]) for n in range(count)]
        return max(n * (linear + quadratic * end) for n, end in zip(pieces, ends, strict=True))

    assert dearest(cut) <= dearest(equal(length, count)) * (1 + 1e-9)


def test_balanced_pieces_take_the_bubble_that_causal_attention_makes_of_equal_ones() -> None:
    """The sizes are 8 ranks, 32 micro batches and 4 pieces; attention is a third of the work."""

    def bubble(lengths: tuple[int, ...]) -> float:
        ends = [sum(lengths[: n + 1]) for n in range(4)]
        costs = tuple(n * (1 + end / 1000) / 1000 for n, end in zip(lengths, ends, strict=True)) * 8
        cost = Cost(costs, tuple(2 * c for c in costs), lengths * 8, pieces=4)
        return simulate(schedules.build("seqpipe", 8, 1, 32, pieces=4), schedules.placement(8, 1), cost).bubble

    even, uneven = bubble(equal(1000, 4)), bubble(balanced(1000, 4, 1.0, 1 / 1000))
    assert uneven < 0.06 < 0.2 < even
