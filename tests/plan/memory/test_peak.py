"""The peak memory of a step, computed by hand for small loads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.plan.memory.walk import FsdpPolicy, Gather, MemoryInUse, PassBytes, StageLoad, fullest
from launcher.plan.schedule.schedules import Action, Row
from launcher.plan.values.model_graph import Backward, Segment

TWO = (Segment("a", 100, Backward(40, 4, 60), 10), Segment("b", 200, Backward(50, 3, 70), 20))
ONCE = PassBytes(TWO, out=5, loss=30)
WAITING = PassBytes(tuple(replace(s, saved=0) for s in TWO), out=0, loss=0)
PLAIN = StageLoad((ONCE,), (), (7, 9), 0, buffers=0)
GROUPS = (Gather(64, 64, 64, 32, 0, 0), Gather(80, 80, 80, 40, 1, 1))
LIGHT = PassBytes((Segment("a", 1, made=1), Segment("b", 2, made=2)), out=5, loss=0)
SHARDED = replace(PLAIN, passes=(LIGHT,), gathers=GROUPS, own=(0, 0))


def row(text: str, stage: int) -> Row:
    """Parse actions such as ``F0 B0``, all of one stage."""
    return tuple(Action(stage, word[0], int(word[1:])) for word in text.split())  # type: ignore[arg-type]


def of(text: str, load: StageLoad, level: int = 1, copied: int = 0, stage: int = 0, early: bool = False) -> MemoryInUse:
    policy = FsdpPolicy(regathers=level == 3, reduces_each_backward=level > 1, scatters_early=early, copied=copied)
    return fullest(row(text, stage), {stage: load}, policy)


def test_one_micro_batch_is_fullest_where_the_loss_goes_backward() -> None:
    assert of("F0 B0", PLAIN) == MemoryInUse(0, 0, 100 + 200 + 5 + 30 + 2 * 30)


def test_with_a_large_block_it_is_in_the_first_backward() -> None:
    assert of("F0 B0", replace(PLAIN, passes=(replace(ONCE, loss=0),))) == MemoryInUse(0, 0, 100 + 200 + 5 + 50)


def test_gradients_of_the_micro_batch_before_are_there_too() -> None:
    assert of("F0 B0 F1 B1", PLAIN).grads == 7 + 9


def test_two_micro_batches_in_flight_are_held_at_once() -> None:
    assert of("F0 F1 B0 B1", PLAIN).activations == 2 * (100 + 200 + 5 + 30) + 2 * 30


@pytest.mark.parametrize("order", ["F0 B0", "F0 B0 F1 B1", "F0 I0 W0 F1 I1 W1"])
def test_messages_are_held_from_a_forward_to_the_end_of_its_backward(order: str) -> None:
    far = replace(ONCE, loss=0, received=1000, answer=500)
    assert of(order, replace(PLAIN, passes=(far,))).activations == 1000 + 100 + 200 + 5 + 500 + 50


def test_split_backwards_keep_what_products_need_until_the_weights_have_theirs() -> None:
    """The peak has what waits of micro batch 0, and micro batch 1 with its loss in the backward."""
    assert of("F0 I0 F1 I1 W0 W1", PLAIN).activations == (4 + 3) + (100 + 200 + 5) + 30 + 2 * 30


def test_second_halves_add_to_the_gradients_there_are_and_hold_no_others() -> None:
    heavy = replace(PLAIN, own=(700, 900))
    assert of("F0 I0 W0 F1 I1 W1", heavy) == MemoryInUse(1600, 0, 100 + 200 + 5 + 30 + 2 * 30)
    assert of("I0 I1 I2 W0 W1 W2", replace(heavy, passes=(WAITING,))) == MemoryInUse(1600, 0, 2 * (4 + 3) + 50)


def test_the_first_stage_has_halves_as_others_have() -> None:
    assert of("F0 I0 F1 I1 W0 W1", PLAIN, stage=0) == of("F0 I0 F1 I1 W0 W1", PLAIN, stage=1)


def test_pieces_of_a_sequence_are_held_as_long_as_they_are() -> None:
    long = PassBytes((Segment("a", 500), Segment("b", 600)), out=5, loss=30)
    assert of("F0 F1 B1 B0", replace(PLAIN, passes=(ONCE, long))).activations == 305 + 30 + 1105 + 30 + 2 * 30


LEAVING = (
    (Segment("a", 100, left=10), Segment("b", 200, left=20)),
    (Segment("a", 100, left=3), Segment("b", 200, left=7)),
    (Segment("a", 1), Segment("b", 1)),
)
"""Three pieces; the last one leaves nothing for later pieces."""


@pytest.mark.parametrize(
    ("piece", "segment", "held"),
    [
        (2, 0, 305 + 305 + 7 - 1 + (20 + 7)),  # b's gradients for both earlier pieces
        (1, 0, 305 + 105 + (10 + 3 + 20 + 7)),  # all of them; its own gradients of b are used, and what it left is kept
        (0, 1, 305 + (10 + 20)),  # the first piece saves what it left for itself
    ],
    ids=["the last piece", "the middle one", "the first one"],
)
def test_pieces_owe_gradients_for_what_they_read_until_those_that_left_it_go_backward(piece, segment, held) -> None:
    """``segment`` of ``piece`` needs so much memory that the peak is there."""
    heavy = [list(s) for s in LEAVING]
    heavy[piece][segment] = replace(heavy[piece][segment], backward=Backward(9000))
    load = replace(PLAIN, passes=tuple(PassBytes(tuple(s), out=5, loss=0) for s in heavy), own=(0, 0))
    assert of("F0 F1 F2 B2 B1 B0", load).activations == held + 9000


def test_sent_messages_are_held_until_the_end_of_the_step() -> None:
    """The peak is in the second micro batch: what both have sent, and the gradient that the first has sent back."""
    posted = replace(ONCE, out=0, sent=5, returned=8)
    assert of("F0 B0 F1 B1", replace(PLAIN, passes=(posted,))) == MemoryInUse(16, 0, 300 + 2 * 5 + 8 + 30 + 2 * 30)


def test_buffers_that_torch_receives_into_are_there_all_along() -> None:
    assert of("F0 B0", replace(PLAIN, buffers=1000)).activations == 1000 + of("F0 B0", PLAIN).activations


def test_an_all_reduce_of_large_gradients_copies_them() -> None:
    assert of("F0 B0", PLAIN, copied=5000) == MemoryInUse(16, 0, 5000)


@pytest.mark.parametrize("text", ["F0 B0", "F0 B0 F1 B1", "F0 F1 B0 B1"])
def test_of_many_groups_each_level_holds_less_than_the_one_before(text: str) -> None:
    many = replace(
        SHARDED,
        passes=(PassBytes(tuple(Segment(str(i), 1, made=1) for i in range(8)), 0, 0),),
        gathers=tuple(Gather(64, 64, 64, 32, i, i) for i in range(8)),
        own=(0,) * 8,
    )
    one, two, three = (of(text, many, level).total for level in (1, 2, 3))
    assert one > two > three


def test_level1_holds_all_weights_and_all_gradients_whole() -> None:
    """When the first group is reduce-scattered, its weights are free; its gradients exist in full and as a shard."""
    assert of("F0 B0 F1 B1", SHARDED) == MemoryInUse(0, 80 + 64 + 80 + 64 + 32, 0)


@pytest.mark.parametrize("text", ["F0 B0", "F0 B0 F1 B1", "F0 F1 B0 B1"])
def test_level1_that_scatters_in_its_last_backward_holds_no_more(text: str) -> None:
    busy = replace(SHARDED, passes=(ONCE,))
    assert of(text, busy, early=True).total <= of(text, busy).total


def test_a_group_scattered_in_the_last_backward_holds_no_weights() -> None:
    assert of("F0 B0", SHARDED, early=True) == MemoryInUse(0, 64 + 80 + 80 + 40, 1 + 5 + 1)


def test_a_group_is_received_and_copied_when_it_is_used_first() -> None:
    frozen = replace(SHARDED, gathers=(Gather(64, 0, 0, 0, 0, 0), Gather(800, 0, 0, 0, 1, 1)))
    assert of("F0 B0", frozen) == MemoryInUse(0, 64 + 800 + 800, 1)


def test_level2_holds_all_weights_and_the_gradients_of_one_group_once_more_side_by_side() -> None:
    assert of("F0 B0", SHARDED, 2) == MemoryInUse(0, 64 + 80 + 80 + 80 + 40, 1 + 5 + 1)


def test_level3_has_dropped_the_weights_by_then_but_gathered_what_comes_next() -> None:
    assert of("F0 B0", SHARDED, 3) == MemoryInUse(0, 80 + 80 + 40 + 64, 1 + 5 + 1)
