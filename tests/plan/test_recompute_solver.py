"""The cheapest choice of blocks to recompute, compared with all possible choices."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.recompute_auto import BlockPolicy, Choice, EqualBlocks, cheapest, chosen, countable, frugal

IN_FLIGHT = 3


def way_of(groups: list[EqualBlocks], choice: Choice) -> list[BlockPolicy]:
    """Return the policy of each block, in the order in which they run."""
    return [next(w for w in g.ways if w.policy == choice[name]) for g in groups for name in g.names]


def peak(ways: list[BlockPolicy]) -> int:
    """Return the peak bytes of a backward, while the activations of other micro batches are kept."""
    others = (IN_FLIGHT - 1) * sum(w.kept for w in ways)
    return others + max(sum(w.kept for w in ways[: i + 1]) + ways[i].work for i in range(len(ways)))


def cost(ways: list[BlockPolicy]) -> tuple[int, int]:
    return sum(w.flops for w in ways), sum(w.again for w in ways)


@st.composite
def stages(draw: st.DrawFn) -> list[EqualBlocks]:
    """Draw blocks; a policy that recomputes more keeps less and needs more memory in its backward."""
    out = []
    for n in range(draw(st.integers(1, 3))):
        flops = sorted(draw(st.lists(st.integers(0, 9), min_size=2, max_size=2)))
        kept = sorted(draw(st.lists(st.integers(0, 20), min_size=3, max_size=3)), reverse=True)
        work = sorted(draw(st.lists(st.integers(0, 20), min_size=3, max_size=3)))
        policies = zip(("none", "selective", "full"), (0, *flops), kept, work, strict=True)
        ways = tuple(BlockPolicy(*figures, again=figures[0] != "none") for figures in policies)
        out.append(EqualBlocks(tuple(f"{n}.{i}" for i in range(draw(st.integers(1, 3)))), ways))
    return out


@given(stages(), st.integers(0, 400))
def test_no_choice_that_fits_is_cheaper(groups, room):
    found = cheapest(groups, lambda choice: peak(way_of(groups, choice)) <= room)
    every = [list(ways) for ways in product(*(g.ways for g in groups for _ in g.names))]
    fitting = [cost(ways) for ways in every if peak(ways) <= room]
    assert (found is None) == (not fitting)
    if found is not None:
        assert peak(way_of(groups, found)) <= room
        assert cost(way_of(groups, found)) == min(fitting)


def test_blocks_that_need_most_for_their_backward_come_first():
    group = EqualBlocks(("a", "b"), (BlockPolicy("none", 0, 10, 1, again=False), BlockPolicy("full", 5, 1, 9)))
    assert cheapest([group], lambda choice: sorted(choice.values()) == ["full", "none"]) == {"a": "full", "b": "none"}


def test_nothing_to_choose_is_a_choice():
    assert cheapest([], lambda choice: True) == {}
    assert cheapest([], lambda choice: False) is None


@given(stages(), st.integers(0, 400))
def test_a_frugal_choice_fits_wherever_one_does_and_is_at_most_one_block_dearer(groups, room):
    """This holds where a choice fits by the bytes that it keeps, and by nothing else."""

    def kept(choice: Choice) -> int:
        return sum(w.kept for w in way_of(groups, choice))

    best = cheapest(groups, lambda choice: kept(choice) <= room)
    found = frugal(groups, lambda choice: kept(choice) <= room)
    assert (found is None) == (best is None)
    if best is not None and found is not None:
        assert kept(found) <= room
        block = max(way.flops for group in groups for way in group.ways)
        assert cost(way_of(groups, found))[0] <= cost(way_of(groups, best))[0] + block


def test_more_choices_than_can_be_counted_take_few_tries():
    ways = (BlockPolicy("none", 0, 10, 1, again=False), BlockPolicy("selective", 1, 6, 4), BlockPolicy("full", 9, 1, 9))
    groups = [EqualBlocks(tuple(f"{n}.{i}" for i in range(20)), ways, in_flight=8 - n) for n in range(8)]
    tries = []

    def fits(choice: Choice) -> bool:
        tries.append(choice)
        return sum(g.in_flight * w.kept for g in groups for w in way_of([g], choice)) <= 4400

    assert not countable(groups)
    assert chosen(groups, fits) in tries
    assert len(tries) < 40


def test_where_the_leanest_choice_needs_most_another_may_fit():
    ways = (
        BlockPolicy("none", 0, 10, 1, again=False),
        BlockPolicy("selective", 1, 6, 4),
        BlockPolicy("full", 9, 1, 90),
    )
    group = EqualBlocks(tuple("abcd"), ways)
    assert frugal([group], lambda choice: peak(way_of([group], choice)) <= 90) == dict.fromkeys("abcd", "selective")
